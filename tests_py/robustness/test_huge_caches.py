# SPDX-License-Identifier: Apache-2.0
"""Caches in which rows lie more than 2^31 and 2^32 elements apart.

Each is address space of which a few pages are ever touched. A product of 32 bits would lead to
rows that are zero: the result must be that of a small cache, bit for bit.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

import cpattn
from audit import machine
from support.cases import Case, assert_attention, make_inputs

RNG = np.random.default_rng(5)
BOUNDARIES = (1 << 31, 1 << 32)
NUM_TOKENS = 110  # on five pages of 24
PAGE_SIZE, HEADS, DIM = 24, 3, 80  # a boundary is in the middle of a page

pytestmark = pytest.mark.skipif(
    not machine.has("address space: 64 GiB"), reason="no address space beyond the memory"
)


def untouched(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that take no memory before they are written."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | machine.MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(shape)


def far_pages(page_elements: int) -> list[int]:
    """Pages with elements right before, at and behind the boundaries, and one near."""
    two, four = (boundary // page_elements for boundary in BOUNDARIES)
    return [four, two + 1, 1, four + 1, two]


def spread(small: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """These pages far apart in a huge array, and where they are."""
    pages = far_pages(int(np.prod(small.shape[1:])))[: len(small)]
    huge = untouched((max(pages) + 1, *small.shape[1:]), small.dtype)
    huge[pages] = small
    return huge, pages


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32).astype(dtype)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 120, shape, np.uint8)  # of FP8, none of them NaN


def assert_same(results, expected):
    for result, right in zip(results, expected, strict=True):
        assert np.array_equal(result, right)
        assert np.any(result)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND", "3-D"])
def test_paged_attention(isa, kv_layout, dtype):
    shape = (5, HEADS, PAGE_SIZE, DIM) if kv_layout == "HND" else (5, PAGE_SIZE, HEADS, DIM)
    q, k, v = (normal(*s, dtype=dtype) for s in ((3, 6, DIM), shape, shape))

    def attend(k, v, pages):
        if kv_layout == "3-D":
            k, v = (x.reshape(-1, HEADS, DIM) for x in (k, v))
        return cpattn.paged_attention(
            q, k, v, q_lens=[3], kv_lens=[NUM_TOKENS], block_tables=[pages], page_size=PAGE_SIZE,
            kv_layout="HND" if kv_layout == "HND" else "NHD", return_lse=True,
        )  # fmt: skip

    (huge_k, pages), (huge_v, _) = spread(k), spread(v)
    assert_same(attend(huge_k, huge_v, pages), attend(k, v, [0, 1, 2, 3, 4]))


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_fused_infer_attention(isa, layout):
    query = normal(1, 2, 6, DIM)
    if layout == "BSH":
        query, small = query.reshape(1, 2, -1), normal(5, PAGE_SIZE, HEADS * DIM)
    else:
        query, small = query.swapaxes(1, 2).copy(), normal(5, HEADS, PAGE_SIZE, DIM)

    def attend(cache, pages):
        return cpattn.npu.npu_fused_infer_attention_score(
            query, cache, cache, num_heads=6, num_key_value_heads=HEADS, input_layout=layout,
            block_size=PAGE_SIZE, block_table=[pages], actual_seq_lengths_kv=[NUM_TOKENS],
            scale=0.1, softmax_lse_flag=True,
        )  # fmt: skip

    assert_same(attend(*spread(small)), attend(small, [0, 1, 2, 3, 4]))


def test_context_parallel_attention(isa):
    metadata = cpattn.build_cp_metadata([20], [NUM_TOKENS], cp_rank=0, cp_size=2)
    q, small = normal(10, 6 * DIM), normal(5, PAGE_SIZE, HEADS, DIM)

    def attend(cache, pages):
        return cpattn.do_cp_attn_fia(
            q, cache, cache, metadata, block_tables=[pages], page_size=PAGE_SIZE, num_heads=6,
            num_kv_heads=HEADS, scale=None, return_lse=True,
        )  # fmt: skip

    assert_same(attend(*spread(small)), attend(small, [0, 1, 2, 3, 4]))


@pytest.mark.parametrize("rows", ["float32", "float16", "FP8"])
def test_sparse_mla(isa, rows):
    if rows == "FP8":
        import ml_dtypes

        q, small = normal(2, 16, 576, dtype=ml_dtypes.bfloat16), fp8_rows(5 * PAGE_SIZE)
        small = small.reshape(5, PAGE_SIZE, 1, 656)
    else:
        q, small = (
            normal(*s, dtype=np.dtype(rows)) for s in ((2, 16, DIM), (5, PAGE_SIZE, 1, DIM))
        )
    positions = np.array([[0, 30, 119, 71], [100, 5, 23, 48]])
    huge, pages = spread(small)
    slots = np.array(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    assert slots.max() * small.shape[-1] > BOUNDARIES[1]
    for flat in (False, True):
        if flat:
            huge = huge.reshape(-1, *huge.shape[2:])
        assert_same(
            cpattn.sparse.flash_mla_sparse_fwd(q, huge, slots, 0.1, 64),
            cpattn.sparse.flash_mla_sparse_fwd(q, small, positions, 0.1, 64),
        )


def fp8_rows(count: int) -> np.ndarray:
    return cpattn.sparse.quantize_kv_rows(normal(count, 512), normal(count, 64))


def test_sparse_flash_attention(isa):
    query, small = normal(2, 4, DIM), normal(5, PAGE_SIZE, 1, DIM)
    positions = np.array([[[0, 30, 108, 71]], [[100, 5, 23, 48]]])

    def attend(cache, pages):
        return cpattn.npu.npu_sparse_flash_attention(
            query, cache, cache, positions, 0.1, block_table=[pages], layout_query="TND",
            layout_kv="PA_BSND", actual_seq_lengths_query=[2], actual_seq_lengths_kv=[NUM_TOKENS],
            return_softmax_lse=True,
        )  # fmt: skip

    assert_same(attend(*spread(small)), attend(small, [0, 1, 2, 3, 4]))


@pytest.mark.parametrize("keys", ["float32", "int8", "uint8"])
def test_paged_indexer(isa, keys):
    """Keys of 128 on pages; those of uint8 with their scales behind them."""
    metadata = cpattn.build_cp_metadata([6], [NUM_TOKENS], cp_rank=0, cp_size=1)
    if keys == "uint8":
        import ml_dtypes

        q = normal(6, 4, 128, dtype=ml_dtypes.float8_e4m3fn)
        small = codes(5, PAGE_SIZE * 132)
        small[:, PAGE_SIZE * 128 :].view(np.float32)[...] = RNG.random((5, PAGE_SIZE), np.float32)
    elif keys == "int8":
        q, small = (codes(*s).view(np.int8) for s in ((6, 4, 128), (5, PAGE_SIZE, 128)))
    else:
        q, small = normal(6, 4, 128), normal(5, PAGE_SIZE, 128)
    weights = normal(6, 4)

    def select(cache, pages):
        return cpattn.sparse.cp_indexer_topk(
            q, cache, weights, metadata, block_tables=[pages], page_size=PAGE_SIZE, topk=20
        )

    assert_same([select(*spread(small))], [select(small, [0, 1, 2, 3, 4])])


def test_lightning_indexer(isa):
    query, weights, small = normal(2, 4, 128), normal(2, 4), normal(5, PAGE_SIZE, 1, 128)

    def select(cache, pages):
        return cpattn.npu.npu_lightning_indexer(
            query, cache, weights, layout_query="TND", layout_key="PA_BSND", sparse_count=20,
            actual_seq_lengths_query=[2], actual_seq_lengths_key=[NUM_TOKENS],
            block_table=[pages], return_value=True,
        )  # fmt: skip

    assert_same(select(*spread(small)), select(small, [0, 1, 2, 3, 4]))


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
    """Its own memory is committed as it is written, too."""
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


@pytest.mark.parametrize("offsets", [False, True])
def test_int8_blocks(isa, offsets):
    """Codes that are written out: only those of the sequence, as all would be 16 GiB."""
    q = normal(1, 3, HEADS, DIM)
    k, v = (RNG.integers(-90, 90, (5, PAGE_SIZE, HEADS * DIM), np.int8) for _ in range(2))
    numbers = {
        f"{side}_antiquant_{name}": RNG.random((HEADS, DIM), np.float32) / 50
        for side in ("key", "value")
        for name in (("scale", "offset") if offsets else ("scale",))
    }

    def attend(k, v, pages):
        return cpattn.npu.npu_fused_infer_attention_score(
            q, k, v, input_layout="BSND", num_heads=HEADS, block_table=[pages],
            block_size=PAGE_SIZE, actual_seq_lengths_kv=[NUM_TOKENS], softmax_lse_flag=True,
            **numbers,
        )  # fmt: skip

    (huge_k, pages), (huge_v, _) = spread(k), spread(v)
    assert_same(attend(huge_k, huge_v, pages), attend(k, v, [0, 1, 2, 3, 4]))


def test_query_rows_far_apart(tmp_path):
    """Rows of 2^30 elements, in a sparse file."""
    inputs = make_inputs(Case(q_lens=(3,), kv_lens=(20,), dtype="float16"))
    rows = np.memmap(tmp_path / "q", dtype=np.float16, mode="w+", shape=(3, 2**30))
    q = torch.from_numpy(rows)[:, : 4 * 64].unflatten(1, (4, 64))
    q.copy_(inputs["q"])
    assert_attention(*cpattn.paged_attention(**inputs | {"q": q}, return_lse=True), inputs)
