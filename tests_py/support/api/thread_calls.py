# SPDX-License-Identifier: Apache-2.0
"""Calls of functions in docs/how_to/threads.md that release the GIL, for any duration."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

import cpattn
from cpattn import npu, reference, sparse, transfer

Call = Callable[[], object]
RNG = np.random.default_rng(0)


@lru_cache(8)  # many calls have equal shapes; larger and larger ones are not kept
def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def repeated(count: int, width: int) -> Any:
    """Repeat one row, without memory."""
    return np.broadcast_to(normal(1, width), (count, width))


def rows(n: int) -> Any:
    """Return [16 * n, 2048]: indices of all keys for each query."""
    return np.tile(np.arange(2048, dtype=np.int32), (16 * n, 1))


CACHE, KEYS, TABLE = normal(64, 16, 2, 64), normal(1024, 64), np.arange(64)[None]
INDEX_KEYS = np.ascontiguousarray(CACHE[:, :, 0])
HEADS = {"num_heads": 4, "num_kv_heads": 2}


def batch(n: int) -> dict[str, Any]:
    """Return a batch of n queries behind 1024 keys, all of which they see."""
    return {"q_lens": [n], "kv_lens": [1024], "block_tables": TABLE, "causal": False}


def on_a_rank(n: int) -> dict[str, Any]:
    """Return a batch of n new tokens behind 1024 on the only rank."""
    metadata = cpattn.build_cp_metadata([n], [1024 + n], cp_rank=0, cp_size=1)
    tables = np.arange(64 + -(-n // 16))[None] % 64
    return {"metadata": metadata, "block_tables": tables, "page_size": 16}


def attention_plan(n: int, **changes: Any) -> cpattn.AttentionPlan:
    sizes = {"page_size": 16, "num_pages": 64, "head_dim": 64} | HEADS
    return cpattn.plan_attention(**batch(n) | changes, **sizes)


def many_plans(n: int) -> Call:
    lens = {"q_lens": [1] * n, "kv_lens": [1024] * n, "causal": True}
    return partial(attention_plan, 1, block_tables=np.zeros((n, 64), np.int32), **lens)


def npu_sparse(n: int) -> Call:
    q, keys = normal(1, n, 4, 64), KEYS[None, :, None]
    return partial(
        npu.npu_sparse_flash_attention, q, keys, keys, chosen(n)[None], 0.1, query_rope=q,
        key_rope=keys, sparse_mode=0, layout_query="BSND", layout_kv="BSND", attention_mode=2,
    )  # fmt: skip


def chosen(n: int) -> Any:
    return np.tile(np.arange(256, dtype=np.int32), (n, 1, 1))


def sparse_mla(module: Any, n: int) -> Call:
    return partial(
        module.flash_mla_sparse_fwd, normal(n, 4, 64), KEYS[:, None], chosen(n), 0.1, d_v=64
    )


def indexer(function: Any, n: int, **options: Any) -> Call:
    q, weights = normal(n, 4, 64), normal(n, 4)
    return partial(function, q, KEYS, weights, [0] * n, [1024] * n, **options)


def topk(function: Any, n: int, **options: Any) -> Call:
    return partial(function, normal(n, 20_000), lengths=[20_000] * n, topk=2048, **options)


def paged_topk(n: int) -> Call:
    table = np.broadcast_to(np.arange(20_000, dtype=np.int32), (n, 20_000))
    options = {"page_table_size_1": table, "cu_seqlens_q": np.arange(n + 1)}
    return topk(sparse.sglang_0_5_23.fast_topk_transform_fused, n, **options)


def norm(function: Any, n: int, **eps: float) -> Call:
    weight = np.ones(224, np.float32)
    return partial(function, repeated(256 * n, 512), weight, weight, 224, 224, 64, **eps)


def set_rows(pool: Any, name: str, n: int, *widths: int) -> Call:
    """Return a call that writes rows of these widths into a pool of as many slots."""
    made = pool(size=256 * n, page_size=16, num_layers=1, container="numpy")
    row = normal(256 * n, *widths)
    both = (row, row) if pool is MHA_POOL else (row,)
    return partial(getattr(made, name), 0, np.arange(256 * n), *both)


MHA_POOL = partial(cpattn.kv.MHATokenToKVPool, num_kv_heads=2, head_dim=64, dtype="bfloat16")
MLA_POOL = partial(
    cpattn.kv.MLATokenToKVPool, kv_lora_rank=64, qk_rope_head_dim=64, index_head_dim=128,
    dtype="bfloat16",
)  # fmt: skip


def digested(n: int) -> Call:
    cache = np.zeros((16 * n, 16, 16, 128), np.float16)
    entry = transfer.KVEntry.from_tensor(0, "k", cache)
    side = transfer.KVLayout([entry], page_size=16, total_kv_heads=16)

    def call() -> None:
        assert transfer.digest(side, np.arange(len(cache)), num_threads=1).num_tokens

    return call


def write_blocks(n: int) -> Call:
    """Return a call that writes a megabyte n times by kilobytes; memory does not limit it."""
    engine = transfer.LocalEngine(num_threads=1)
    src, dst = np.zeros(1 << 20, np.uint8), np.zeros(n << 20, np.uint8)
    engine.register([src.ctypes.data, dst.ctypes.data], [src.nbytes, dst.nbytes])
    starts = np.arange(0, n << 20, 1 << 10, dtype=np.uint64)
    blocks = (starts % (1 << 20) + src.ctypes.data, starts + dst.ctypes.data)
    lengths = np.full(len(starts), 1 << 10, np.uint64)

    def call() -> None:
        assert src.size <= dst.size  # the closure also keeps both alive
        assert engine.write(engine.session_id, *blocks, lengths) == 0

    return call


def merge(module: Any, n: int) -> Call:
    parts = normal(64 * n, 4, 64), normal(64 * n, 4)
    return partial(module.merge_state, *(part.copy() for part in (*parts, *parts)))


def merge_many(n: int) -> Call:
    parts, lses = normal(64 * n, 4, 64), normal(64 * n, 4)
    return partial(cpattn.merge_states, [parts] * 3, [lses] * 3)


def write_pages(n: int) -> Call:
    row, pages = normal(256 * n, 2, 64), np.zeros((2, 16 * n, 16, 2, 64), np.float32)
    return partial(cpattn.kv.write_pages, np.arange(256 * n), row, pages[0], row, pages[1])


def move_rows(n: int) -> Call:
    caches = [normal(256 * n, 2, 64).copy() for _ in range(2)]
    slots = np.arange(256 * n)
    return partial(cpattn.kv.move_rows, slots, slots[::-1].copy(), caches)


def index_cache(n: int) -> tuple[Any, Any]:
    return np.zeros((16 * n, 16 * 132), np.uint8), np.arange(256 * n)


def transform(function: Any, n: int, **more: Any) -> Call:
    return partial(function, rows(n), rows(n), **more)


def layouts() -> list[transfer.KVLayout]:
    """Return the layouts of a sender and of a receiver, with the keys of 61 layers."""
    made = []
    for base in (16 << 32, 17 << 32):
        addresses = [base + (layer << 26) for layer in range(61)]
        entries = [
            transfer.KVEntry(layer, "k", False, address, 1 << 26, 64)
            for layer, address in enumerate(addresses)
        ]
        made.append(transfer.KVLayout(entries, page_size=4))
    return made


def pages(n: int) -> Any:
    return RNG.permutation(1 << 17)[: 64 * n]


def send(function: Any, n: int, **options: Any) -> Call:
    ptrs = [(1 << 30) + i * 2**26 for i in range(122)]
    args = transfer.sglang_0_5_23.KVArgs(
        kv_data_ptrs=ptrs, kv_item_lens=[64] * 122, kv_data_lens=[2**26] * 122, engine_rank=0,
        page_size=4, kv_head_num=2, prefill_start_layer=0,
    )  # fmt: skip
    return partial(function, args, [ptr + (1 << 40) for ptr in ptrs], pages(n), pages(n), **options)


SLICE = {"dst_tp_rank": 0, "dst_attn_tp_size": 2, "dst_kv_item_len": 32, "attn_tp_size": 1}

MAKERS: dict[str, Callable[[int], Call]] = {
    "paged_attention": lambda n: partial(
        cpattn.paged_attention, normal(n, 4, 64), CACHE, CACHE, **batch(n)
    ),
    "run_attention": lambda n: partial(
        cpattn.run_attention, attention_plan(n), normal(n, 4, 64), CACHE, CACHE
    ),
    "do_cp_attn_fia": lambda n: partial(
        cpattn.do_cp_attn_fia, normal(n, 256), CACHE, CACHE, scale=None, **HEADS, **on_a_rank(n)
    ),
    "npu_fused_infer_attention_score": lambda n: partial(
        npu.npu_fused_infer_attention_score,
        normal(1, n, 4, 64),
        CACHE.reshape(1, 1024, 2, 64),
        CACHE.reshape(1, 1024, 2, 64),
        num_heads=4,
        num_key_value_heads=2,
        input_layout="BSND",
    ),
    "npu_sparse_flash_attention": npu_sparse,
    "flash_mla_sparse_fwd": partial(sparse_mla, sparse),
    "indexer_logits": partial(indexer, sparse.indexer_logits),
    "indexer_topk": partial(indexer, sparse.indexer_topk, topk=64),
    "cp_indexer_topk": lambda n: partial(
        sparse.cp_indexer_topk, normal(n, 4, 64), INDEX_KEYS, normal(n, 4), topk=64, **on_a_rank(n)
    ),
    "cp_sparse_mla": lambda n: partial(
        sparse.cp_sparse_mla,
        normal(n, 4, 64),
        INDEX_KEYS.reshape(-1, 1, 64),
        normal(n, 4, 64),
        INDEX_KEYS,
        normal(n, 4),
        topk=64,
        sm_scale=0.1,
        d_v=64,
        **on_a_rank(n),
    ),
    "npu_lightning_indexer": lambda n: partial(
        npu.npu_lightning_indexer,
        normal(1, n, 4, 64),
        KEYS[None, :, None],
        normal(1, n, 4),
        sparse_count=64,
        sparse_mode=0,
        layout_query="BSND",
        layout_key="BSND",
    ),
    "fast_topk": partial(topk, sparse.sglang_0_5_23.fast_topk),
    "fast_topk_transform_fused": paged_topk,
    "fast_topk_transform_ragged_fused": lambda n: topk(
        sparse.sglang_0_5_23.fast_topk_transform_ragged_fused, n, topk_indices_offset=[0] * n
    ),
    "topk_transform": partial(topk, sparse.topk_transform, method=None),
    "select_blocks": lambda n: partial(
        sparse.select_blocks, normal(n, 20_000), lengths=[20_000] * n, topk=16
    ),
    "hadamard_transform": lambda n: partial(sparse.hadamard_transform, repeated(256 * n, 512)),
    "quantize_index": lambda n: partial(sparse.quantize_index, repeated(256 * n, 512)),
    "quantize_kv_rows": lambda n: partial(
        sparse.quantize_kv_rows, repeated(256 * n, 512), repeated(256 * n, 64)
    ),
    "quantize_kv_rows_separate": lambda n: partial(
        sparse.quantize_kv_rows_separate, repeated(256 * n, 512), repeated(256 * n, 64)
    ),
    "dequantize_kv_rows": lambda n: partial(
        sparse.dequantize_kv_rows, np.zeros((256 * n, 656), np.uint8)
    ),
    "split_qk_norm": partial(norm, sparse.split_qk_norm, q_eps=1e-6, kv_eps=1e-6),
    "fused_split_qk_norm": partial(norm, sparse.fused_split_qk_norm, eps=1e-6),
    "MHATokenToKVPool.set_kv_buffer": lambda n: set_rows(MHA_POOL, "set_kv_buffer", n, 2, 64),
    "write_pages": write_pages,
    "move_rows": move_rows,
    "DSATokenToKVPool.set_kv_buffer": lambda n: set_rows(
        cpattn.kv.DSATokenToKVPool, "set_kv_buffer", n, 576
    ),
    "MLATokenToKVPool.set_index_k_buffer": lambda n: set_rows(
        MLA_POOL, "set_index_k_buffer", n, 1, 128
    ),
    "LocalEngine.write": write_blocks,
    "reference.paged_attention": lambda n: partial(
        reference.paged_attention, normal(n, 4, 64), CACHE, CACHE, **batch(n)
    ),
    "reference.flash_mla_sparse_fwd": partial(sparse_mla, reference),
    "reference.indexer_logits": partial(indexer, reference.indexer_logits),
    "reference.merge_state": partial(merge, reference),
    "reference.rms_norm": lambda n: partial(
        reference.rms_norm, repeated(256 * n, 512), np.ones(512, np.float32), 1e-6
    ),
    "reference.hadamard_transform": lambda n: partial(
        reference.hadamard_transform, repeated(n, 256)
    ),
    "reference.dequantize_kv_rows": lambda n: partial(
        reference.dequantize_kv_rows, np.zeros((256 * n, 656), np.uint8)
    ),
    "merge_state": partial(merge, cpattn),
    "merge_states": merge_many,
    "write_index_k_cache": lambda n: partial(
        sparse.write_index_k_cache,
        *index_cache(n),
        np.zeros((256 * n, 128), np.uint8),
        np.ones(256 * n, np.float32),
    ),
    "read_index_k_cache": lambda n: partial(sparse.read_index_k_cache, *index_cache(n)),
    "merge_blocks": lambda n: partial(
        sparse.merge_blocks, np.ones((16 * n, 4096), np.int32), normal(16 * n, 4096), 16
    ),
    "dcp_local_indices": lambda n: partial(
        sparse.dcp_local_indices, rows(n), dcp_rank=1, dcp_size=2
    ),
    "transform_index_page_table_decode": partial(
        transform, sparse.sglang_0_5_23.transform_index_page_table_decode
    ),
    "transform_index_page_table_prefill": lambda n: transform(
        sparse.sglang_0_5_23.transform_index_page_table_prefill, n, extend_lens_cpu=[1] * (16 * n)
    ),
    "page_table_to_topk": lambda n: partial(
        sparse.sglang_0_5_23.page_table_to_topk, rows(n), [2048] * (16 * n), 2048
    ),
    "digest": digested,
    "plan_attention": many_plans,
    "plan_kv_transfer": lambda n: partial(
        transfer.plan_kv_transfer, *layouts(), pages(n), pages(n)
    ),
    "plan_kv_links": lambda n: partial(
        transfer.plan_kv_links, *([side] for side in (*layouts(), pages(n), pages(n)))
    ),
    "plan_send_kvcache": partial(
        send, transfer.sglang_0_5_23.plan_send_kvcache, pp_size=1, is_mla=True
    ),
    "plan_send_kvcache_slice": partial(
        send, transfer.sglang_0_5_23.plan_send_kvcache_slice, **SLICE
    ),
    "build_cp_metadata": lambda n: partial(
        cpattn.build_cp_metadata, [5] * max(n, 64), cp_rank=0, cp_size=8
    ),
    "build_cp_metadata_all_ranks": lambda n: partial(
        cpattn.build_cp_metadata_all_ranks, [5] * max(n, 64), cp_size=8
    ),
    "pad_topk_indices": lambda n: partial(
        sparse.sglang_0_5_23.pad_topk_indices, np.ones((64 * n, 64), np.int32), 128 * n
    ),
}
