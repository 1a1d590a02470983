# SPDX-License-Identifier: Apache-2.0
"""Rows of caches may lie more than 2^31 and 2^32 elements apart. Only a few pages are written, so
a product of 32 bits would find zeros, not the bits of a small cache."""

import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cpattn
from audit import machine

RNG = np.random.default_rng(5)
BOUNDARIES = (1 << 31, 1 << 32)
NUM_TOKENS = 110  # they lie on five pages of 24
PAGE_SIZE, HEADS, DIM = 24, 3, 80  # a boundary is in the middle of a page

pytestmark = pytest.mark.skipif(
    not machine.has("address space: 64 GiB"), reason="no address space beyond the memory"
)


def untouched(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return zeros that take no memory before they are written."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | machine.MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def far_pages(page_elements: int) -> list[int]:
    """Return pages with elements right before, at and after the boundaries, and one near."""
    two, four = (boundary // page_elements for boundary in BOUNDARIES)
    return [four, two + 1, 1, four + 1, two]


def spread(small: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Put these pages far apart in a huge array; return it, and their numbers."""
    pages = far_pages(int(np.prod(small.shape[1:])))[: len(small)]
    huge = untouched((max(pages) + 1, *small.shape[1:]), small.dtype)
    huge[pages] = small
    return huge, pages


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32).astype(dtype)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 120, shape, np.uint8)  # no code of FP8 here is NaN


def assert_same(results, expected):
    for result, right in zip(results, expected, strict=True):
        assert np.array_equal(result, right)
        assert np.any(result)


def attend(kv_layout: str, dtype: type):
    shape = (5, HEADS, PAGE_SIZE, DIM) if kv_layout == "HND" else (5, PAGE_SIZE, HEADS, DIM)
    q, layout = normal(3, 6, DIM, dtype=dtype), "HND" if kv_layout == "HND" else "NHD"

    def run(cache, pages):
        if kv_layout == "3-D":
            cache = cache.reshape(-1, HEADS, DIM)
        return cpattn.paged_attention(
            q, cache, cache, q_lens=[3], kv_lens=[NUM_TOKENS], block_tables=[pages],
            page_size=PAGE_SIZE, kv_layout=layout, return_lse=True,
        )  # fmt: skip

    return normal(*shape, dtype=dtype), run


def fused(layout: str):
    query, small = normal(1, 6, 2, DIM), normal(5, HEADS, PAGE_SIZE, DIM)
    if layout == "BSH":
        query, small = normal(1, 2, 6 * DIM), normal(5, PAGE_SIZE, HEADS * DIM)
    return small, lambda cache, pages: cpattn.npu.npu_fused_infer_attention_score(
        query, cache, cache, num_heads=6, num_key_value_heads=HEADS, input_layout=layout,
        block_size=PAGE_SIZE, block_table=[pages], actual_seq_lengths_kv=[NUM_TOKENS],
        scale=0.1, softmax_lse_flag=True,
    )  # fmt: skip


def fused_int8(*names: str):
    """Make a case of codes; only the sequence's are expanded, as all would take 16 GiB."""
    numbers = {
        f"{side}_antiquant_{name}": RNG.random((HEADS, DIM), np.float32) / 50
        for side in ("key", "value")
        for name in names
    }
    q, small = normal(1, 3, HEADS, DIM), RNG.integers(-90, 90, (5, PAGE_SIZE, HEADS * DIM), np.int8)
    return small, lambda cache, pages: cpattn.npu.npu_fused_infer_attention_score(
        q, cache, cache, input_layout="BSND", num_heads=HEADS, block_table=[pages],
        block_size=PAGE_SIZE, actual_seq_lengths_kv=[NUM_TOKENS], softmax_lse_flag=True, **numbers,
    )  # fmt: skip


def context_parallel():
    metadata, q = METADATA, normal(20, 6 * DIM)
    return normal(5, PAGE_SIZE, HEADS, DIM), lambda cache, pages: cpattn.do_cp_attn_fia(
        q, cache, cache, metadata, block_tables=[pages], page_size=PAGE_SIZE, num_heads=6,
        num_kv_heads=HEADS, scale=None, return_lse=True,
    )  # fmt: skip


def sparse_flash():
    query, positions = normal(2, 4, DIM), np.array([[[0, 30, 108, 71]], [[100, 5, 23, 48]]])
    small = normal(5, PAGE_SIZE, 1, DIM)
    return small, lambda cache, pages: cpattn.npu.npu_sparse_flash_attention(
        query, cache, cache, positions, 0.1, block_table=[pages], layout_query="TND",
        layout_kv="PA_BSND", actual_seq_lengths_query=[2], actual_seq_lengths_kv=[NUM_TOKENS],
        return_softmax_lse=True,
    )  # fmt: skip


def paged_indexer(keys: str):
    """Make a case with keys of 128 on pages; uint8 pages have scales after the keys."""
    q, small, weights = normal(20, 4, 128), normal(5, PAGE_SIZE, 128), normal(20, 4)
    if keys == "uint8":
        q, small = q.astype(ml_dtypes.float8_e4m3fn), codes(5, PAGE_SIZE * 132)
        small[:, PAGE_SIZE * 128 :].view(np.float32)[...] = RNG.random((5, PAGE_SIZE), np.float32)
    elif keys == "int8":
        q, small = (codes(*s).view(np.int8) for s in (q.shape, small.shape))
    return small, lambda cache, pages: [
        cpattn.sparse.cp_indexer_topk(
            q, cache, weights, METADATA, block_tables=[pages], page_size=PAGE_SIZE, topk=20
        )
    ]


def lightning_indexer():
    query, weights = normal(2, 4, 128), normal(2, 4)
    return normal(5, PAGE_SIZE, 1, 128), lambda cache, pages: cpattn.npu.npu_lightning_indexer(
        query, cache, weights, layout_query="TND", layout_key="PA_BSND", sparse_count=20,
        actual_seq_lengths_query=[2], actual_seq_lengths_key=[NUM_TOKENS], block_table=[pages],
        return_value=True,
    )  # fmt: skip


METADATA = cpattn.build_cp_metadata([20], [NUM_TOKENS], cp_rank=0, cp_size=1)
PAGED = [
    *[(attend, "NHD", np.float16), (attend, "HND", np.float32), (attend, "3-D", np.float32)],
    *[(fused, "BSH"), (fused, "BNSD"), (fused_int8, "scale"), (fused_int8, "scale", "offset")],
    *[(context_parallel,), (sparse_flash,), (lightning_indexer,)],
    *[(paged_indexer, "float32"), (paged_indexer, "int8"), (paged_indexer, "uint8")],
]


@pytest.mark.parametrize("make", PAGED, ids=lambda make: make[0].__name__)
def test_pages_far_apart(isa, make):
    small, run = make[0](*make[1:])
    assert_same(run(*spread(small)), run(small, [0, 1, 2, 3, 4]))


@pytest.mark.parametrize("rows", ["float32", "float16", "FP8"])
def test_sparse_mla(isa, rows):
    if rows == "FP8":
        q, small = normal(2, 16, 576, dtype=ml_dtypes.bfloat16), fp8_rows(5 * PAGE_SIZE)
        small = small.reshape(5, PAGE_SIZE, 1, 656)
    else:
        q, small = (normal(*s, dtype=rows) for s in ((2, 16, DIM), (5, PAGE_SIZE, 1, DIM)))
    positions = np.array([[0, 30, 119, 71], [100, 5, 23, 48]])
    huge, pages = spread(small)
    slots = np.array(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    assert slots.max() * small.shape[-1] > BOUNDARIES[1]
    for cache in (huge, huge.reshape(-1, *huge.shape[2:])):
        assert_same(
            cpattn.sparse.flash_mla_sparse_fwd(q, cache, slots, 0.1, 64),
            cpattn.sparse.flash_mla_sparse_fwd(q, small, positions, 0.1, 64),
        )


def fp8_rows(count: int) -> np.ndarray:
    return cpattn.sparse.quantize_kv_rows(normal(count, 512), normal(count, 64))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_indexer_over_concatenated_keys(isa, boundary):
    dim = 256
    q, small, weights = normal(2, 4, dim), normal(50, dim), normal(2, 4)
    begin = boundary // dim - 20
    huge = untouched((begin + 50, dim), np.float32)
    huge[begin:] = small
    ranges = np.array([0, 3]), np.array([47, 50])
    assert_same(
        [cpattn.sparse.indexer_topk(q, huge, weights, *(begin + x for x in ranges), topk=20)],
        [cpattn.sparse.indexer_topk(q, small, weights, *ranges, topk=20)],
    )


def test_rows_of_the_fp8_cache():
    small = fp8_rows(5 * PAGE_SIZE).reshape(5, PAGE_SIZE, 1, 656)
    huge, pages = spread(small)
    slots = np.concatenate([np.arange(PAGE_SIZE) + page * PAGE_SIZE for page in pages])
    assert_same(
        [cpattn.sparse.dequantize_kv_rows(huge, slots)], [cpattn.sparse.dequantize_kv_rows(small)]
    )


def test_keys_of_the_indexer_are_written_and_read():
    small = codes(5, PAGE_SIZE * 132)
    pages = far_pages(PAGE_SIZE * 132)
    huge = untouched((max(pages) + 1, PAGE_SIZE * 132), np.uint8)
    near = np.arange(5 * PAGE_SIZE)
    slots = np.array(pages)[near // PAGE_SIZE] * PAGE_SIZE + near % PAGE_SIZE
    k, k_scale = cpattn.sparse.read_index_k_cache(small, near, dtype="int8")
    cpattn.sparse.write_index_k_cache(huge, slots, k, k_scale)
    assert_same(huge[pages], small)
    read = cpattn.sparse.read_index_k_cache(huge, slots, dtype="int8")
    assert_same([x.view(np.uint8) for x in read], [x.view(np.uint8) for x in (k, k_scale)])


@pytest.mark.parametrize("use_fia", [False, True])
def test_a_pool_is_written(use_fia):
    """The pool's own memory takes space only as it is written, too."""
    row = HEADS * DIM
    slots = np.array([boundary // row + i for boundary in BOUNDARIES for i in (0, 1)] + [7])
    pool = cpattn.kv.MHATokenToKVPool(
        size=int(slots.max()) + PAGE_SIZE, page_size=PAGE_SIZE, num_layers=1,
        num_kv_heads=HEADS, head_dim=DIM, dtype="float16", container="numpy", use_fia=use_fia,
    )  # fmt: skip
    k, v = normal(5, HEADS, DIM, dtype=np.float16), normal(5, HEADS, DIM, dtype=np.float16)
    pool.set_kv_buffer(0, slots, k, v)
    for buffer, rows in ((pool.get_key_buffer(0), k), (pool.get_value_buffer(0), v)):
        assert_same(buffer.reshape(-1, HEADS, DIM)[slots], rows)
