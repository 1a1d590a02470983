# SPDX-License-Identifier: Apache-2.0
"""Calls of every function of docs/how_to/threads.md, each as long as is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import cpattn
from cpattn import ForwardMode, reference, transfer
from support.api.transfer_thread_calls import (
    RNG,
    Call,
    cp_share,
    plan_links,
    plan_send,
    plan_slice,
    plan_transfer,
    send_indices,
    shard_share,
)


@cache  # of shapes that many calls have
def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape, np.float32)


def repeated(count: int, width: int) -> Any:
    """The same row again and again, without memory."""
    return np.broadcast_to(normal(1, width), (count, width))


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def lens(n: int) -> list[int]:
    """Of n sequences; a single one has the GIL kept."""
    return [5] * max(n, 64)


CACHE = normal(64, 16, 2, 64)

TABLE = np.arange(64)[None]

KEYS = normal(1024, 64)


def batch(n: int) -> dict[str, Any]:
    """n queries behind 1024 keys, all of which they see."""
    return {"q_lens": [n], "kv_lens": [1024], "block_tables": TABLE, "causal": False}


def attention_plan(n: int, **changes: Any) -> cpattn.AttentionPlan:
    sizes = {"page_size": 16, "num_pages": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    return cpattn.plan_attention(**batch(n) | changes, **sizes)


def run_attention(n: int) -> Call:
    plan, q = attention_plan(n), normal(n, 4, 64)
    return lambda: cpattn.run_attention(plan, q, CACHE, CACHE)


def many_plans(n: int) -> Call:
    """Pages of many sequences."""
    tables = zeros(n, 64, dtype=np.int32)
    return lambda: attention_plan(
        1, q_lens=[1] * n, kv_lens=[1024] * n, block_tables=tables, causal=True
    )


def cp_metadata(n: int) -> cpattn.ContextParallelMetadata:
    return cpattn.build_cp_metadata([n], [1024 + n], cp_rank=0, cp_size=1)


def wide_table(n: int) -> Any:
    return np.arange(64 + -(-n // 16))[None] % 64


def do_cp_attn_fia(n: int) -> Call:
    q, metadata, table = normal(n, 256), cp_metadata(n), wide_table(n)
    options = {"block_tables": table, "page_size": 16, "num_heads": 4, "num_kv_heads": 2}
    return lambda: cpattn.do_cp_attn_fia(q, CACHE, CACHE, metadata, scale=None, **options)


def cp_indexer_topk(n: int) -> Call:
    q, weights, metadata, table = normal(n, 4, 64), normal(n, 4), cp_metadata(n), wide_table(n)
    keys = np.ascontiguousarray(CACHE[:, :, 0])
    return lambda: cpattn.sparse.cp_indexer_topk(
        q, keys, weights, metadata, block_tables=table, page_size=16, topk=64
    )


def cp_sparse_mla(n: int) -> Call:
    q, weights, metadata, table = normal(n, 4, 64), normal(n, 4), cp_metadata(n), wide_table(n)
    index_keys = np.ascontiguousarray(CACHE[:, :, 0])
    latents = index_keys.reshape(-1, 1, 64)
    return lambda: cpattn.sparse.cp_sparse_mla(
        q, latents, q, index_keys, weights, metadata, block_tables=table, page_size=16, topk=64,
        sm_scale=0.1, d_v=64,
    )  # fmt: skip


def npu_fused(n: int) -> Call:
    q, cache = normal(1, n, 4, 64), CACHE.reshape(1, 1024, 2, 64)
    options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
    return lambda: cpattn.npu.npu_fused_infer_attention_score(q, cache, cache, **options)


def npu_indexer(n: int) -> Call:
    q, weights = normal(1, n, 4, 64), normal(1, n, 4)
    return lambda: cpattn.npu.npu_lightning_indexer(
        q, KEYS[None, :, None], weights, sparse_count=64, sparse_mode=0, layout_query="BSND",
        layout_key="BSND",
    )  # fmt: skip


def sparse_indices(n: int) -> Any:
    return np.tile(np.arange(256, dtype=np.int32), (n, 1, 1))


def npu_sparse(n: int) -> Call:
    q, keys, indices = normal(1, n, 4, 64), KEYS[None, :, None], sparse_indices(n)[None]
    return lambda: cpattn.npu.npu_sparse_flash_attention(
        q, keys, keys, indices, 0.1, query_rope=q, key_rope=keys, sparse_mode=0,
        layout_query="BSND", layout_kv="BSND", attention_mode=2,
    )  # fmt: skip


def sparse_mla(module: Any) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        q, kv, indices = normal(n, 4, 64), KEYS[:, None], sparse_indices(n)
        return lambda: module.flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=64)

    return make


def indexer(function: Any, **options: Any) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        q, weights = normal(n, 4, 64), normal(n, 4)
        return lambda: function(q, KEYS, weights, [0] * n, [1024] * n, **options)

    return make


def plain_topk(n: int) -> Call:
    scores = normal(n, 20_000)
    return lambda: cpattn.sparse.fast_topk(scores, [20_000] * n, 2048)


def slot_table(n: int) -> Any:
    return np.broadcast_to(np.arange(20_000, dtype=np.int32), (n, 20_000))


def paged_topk(n: int) -> Call:
    scores, table = normal(n, 20_000), slot_table(n)
    return lambda: cpattn.sparse.fast_topk_transform_fused(
        scores, [20_000] * n, page_table_size_1=table, cu_seqlens_q=np.arange(n + 1), topk=2048
    )


def ragged_topk(n: int) -> Call:
    scores = normal(n, 20_000)
    return lambda: cpattn.sparse.fast_topk_transform_ragged_fused(
        scores, [20_000] * n, topk_indices_offset=[0] * n, topk=2048
    )


def any_topk(n: int) -> Call:
    scores = normal(n, 20_000)
    return lambda: cpattn.sparse.topk_transform(
        scores, lengths=[20_000] * n, topk=2048, method=None
    )


def rows(function: Any, *widths: int, **options: Any) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        tensors = [repeated(256 * n, width) for width in widths]
        return lambda: function(*tensors, **options)

    return make


def split_norm(function: Any, **eps: float) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        x, weight = repeated(256 * n, 512), np.ones(224, np.float32)
        return lambda: function(x, weight, weight, 224, 224, 64, **eps)

    return make


def dequantize(module: Any) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        codes = zeros(256 * n, 656, dtype=np.uint8)
        return lambda: module.dequantize_kv_rows(codes)

    return make


def set_kv(n: int) -> Call:
    pool = cpattn.kv.MHATokenToKVPool(
        size=256 * n, page_size=16, num_layers=1, num_kv_heads=2, head_dim=64, dtype="bfloat16"
    )
    k, slots = normal(256 * n, 2, 64), np.arange(256 * n)
    return lambda: pool.set_kv_buffer(0, slots, k, k)


def set_dsa_rows(n: int) -> Call:
    pool = cpattn.kv.DSATokenToKVPool(size=256 * n, page_size=16, num_layers=1)
    k, slots = normal(256 * n, 576), np.arange(256 * n)
    return lambda: pool.set_kv_buffer(0, slots, k)


def set_index_k(n: int) -> Call:
    pool = cpattn.kv.MLATokenToKVPool(
        size=256 * n,
        page_size=16,
        num_layers=1,
        kv_lora_rank=64,
        qk_rope_head_dim=64,
        index_head_dim=128,
        dtype="bfloat16",
    )
    k, slots = normal(256 * n, 1, 128), np.arange(256 * n)
    return lambda: pool.set_index_k_buffer(0, slots, k)


def write_blocks(n: int) -> Call:
    """The same megabyte n times, a kilobyte at a time: memory is no part of it."""
    engine = transfer.LocalEngine(num_threads=1)
    src, dst = zeros(1 << 20, dtype=np.uint8), zeros(n << 20, dtype=np.uint8)
    engine.register([src.ctypes.data, dst.ctypes.data], [src.nbytes, dst.nbytes])
    starts = np.arange(0, n << 20, 1 << 10, dtype=np.uint64)
    blocks = (starts % (1 << 20) + src.ctypes.data, starts + dst.ctypes.data)
    lengths = np.full(len(starts), 1 << 10, np.uint64)

    def call() -> None:
        assert src.size <= dst.size  # and so they live as long as this
        assert engine.write(engine.session_id, *blocks, lengths) == 0

    return call


def merge(module: Any) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        parts = [
            part.copy() for _ in range(2) for part in (normal(64 * n, 4, 64), normal(64 * n, 4))
        ]
        return lambda: module.merge_state(*parts)

    return make


def index_cache(n: int) -> tuple[Any, Any]:
    return zeros(16 * n, 16 * 132, dtype=np.uint8), np.arange(256 * n)


def write_index_k(n: int) -> Call:
    pages, slots = index_cache(n)
    codes, scale = zeros(256 * n, 128, dtype=np.uint8), np.ones(256 * n, np.float32)
    return lambda: cpattn.sparse.write_index_k_cache(pages, slots, codes, scale)


def read_index_k(n: int) -> Call:
    pages, slots = index_cache(n)
    return lambda: cpattn.sparse.read_index_k_cache(pages, slots)


def transform(function: Any, **more: Callable[[int], Any]) -> Callable[[int], Call]:
    def make(n: int) -> Call:
        table = np.tile(np.arange(2048, dtype=np.int32), (16 * n, 1))
        last = {name: value(n) for name, value in more.items()}
        return lambda: function(table, table, **last)

    return make


def rows_of_slots(n: int) -> Any:
    return np.tile(np.arange(2048, dtype=np.int32), (16 * n, 1))


def made(function: Callable[..., object], *arguments: Callable[[int], Any]) -> Any:
    """A call with arguments that are made before it."""

    def make(n: int) -> Call:
        values = [argument(n) for argument in arguments]
        return lambda: function(*values)

    return make


def attention_of(module: Any) -> Any:
    return made(
        lambda q, sizes: module.paged_attention(q, CACHE, CACHE, **sizes),
        lambda n: normal(n, 4, 64), batch,
    )  # fmt: skip


def dsa_metadata(sizes: list[int]) -> object:
    return cpattn.sparse.build_dsa_metadata(
        sizes, sizes, forward_mode=ForwardMode.EXTEND, topk=2048, fp8_kv_cache=True,
        prefill_impl="fa3",
    )  # fmt: skip


def plan_gather(n: int) -> Call:
    slots, lens = 32 + np.arange(256 * n)[None], [256 * n]
    sizes = {"size": 256 * n, "max_prefix_tokens": 256 * n, "chunk_tokens": 16}
    sizes["placement"] = cpattn.kv.PageInterleave(shard_size=2, page_size=16)
    return lambda: cpattn.kv.plan_shard_gather(slots, None, lens, lens, **sizes)


def steps(n: int) -> Any:
    return np.arange(256 * n)


MAKERS: dict[str, Callable[[int], Call]] = {
    "paged_attention": attention_of(cpattn),
    "run_attention": run_attention,
    "do_cp_attn_fia": do_cp_attn_fia,
    "npu_fused_infer_attention_score": npu_fused,
    "npu_sparse_flash_attention": npu_sparse,
    "flash_mla_sparse_fwd": sparse_mla(cpattn.sparse),
    "indexer_logits": indexer(cpattn.sparse.indexer_logits),
    "indexer_topk": indexer(cpattn.sparse.indexer_topk, topk=64),
    "cp_indexer_topk": cp_indexer_topk,
    "cp_sparse_mla": cp_sparse_mla,
    "npu_lightning_indexer": npu_indexer,
    "fast_topk": plain_topk,
    "fast_topk_transform_fused": paged_topk,
    "fast_topk_transform_ragged_fused": ragged_topk,
    "topk_transform": any_topk,
    "hadamard_transform": rows(cpattn.sparse.hadamard_transform, 512),
    "quantize_index": rows(cpattn.sparse.quantize_index, 512),
    "quantize_kv_rows": rows(cpattn.sparse.quantize_kv_rows, 512, 64),
    "quantize_kv_rows_separate": rows(cpattn.sparse.quantize_kv_rows_separate, 512, 64),
    "dequantize_kv_rows": dequantize(cpattn.sparse),
    "split_qk_norm": split_norm(cpattn.sparse.split_qk_norm, q_eps=1e-6, kv_eps=1e-6),
    "fused_split_qk_norm": split_norm(cpattn.sparse.fused_split_qk_norm, eps=1e-6),
    "MHATokenToKVPool.set_kv_buffer": set_kv,
    "DSATokenToKVPool.set_kv_buffer": set_dsa_rows,
    "MLATokenToKVPool.set_index_k_buffer": set_index_k,
    "LocalEngine.write": write_blocks,
    "reference.paged_attention": attention_of(reference),
    "reference.flash_mla_sparse_fwd": sparse_mla(reference),
    "reference.indexer_logits": indexer(reference.indexer_logits),
    "reference.merge_state": merge(reference),
    "reference.rms_norm": made(
        lambda x: reference.rms_norm(x, np.ones(512, np.float32), 1e-6),
        lambda n: repeated(256 * n, 512),
    ),
    "reference.hadamard_transform": made(reference.hadamard_transform, lambda n: repeated(n, 256)),
    "reference.dequantize_kv_rows": dequantize(reference),
    "merge_state": merge(cpattn),
    "write_index_k_cache": write_index_k,
    "read_index_k_cache": read_index_k,
    "dcp_local_indices": made(
        lambda indices: cpattn.sparse.dcp_local_indices(indices, dcp_rank=1, dcp_size=2),
        rows_of_slots,
    ),
    "transform_index_page_table_decode": transform(cpattn.sparse.transform_index_page_table_decode),
    "transform_index_page_table_prefill": transform(
        cpattn.sparse.transform_index_page_table_prefill, extend_lens_cpu=lambda n: [1] * (16 * n)
    ),
    "page_table_to_topk": made(
        lambda table: cpattn.sparse.page_table_to_topk(table, [2048] * len(table), 2048),
        rows_of_slots,
    ),
    "plan_attention": many_plans,
    "plan_kv_transfer": plan_transfer,
    "plan_kv_links": plan_links,
    "plan_send_kvcache": plan_send,
    "plan_send_kvcache_slice": plan_slice,
    "build_cp_metadata": made(
        lambda sizes: cpattn.build_cp_metadata(sizes, cp_rank=0, cp_size=8), lens
    ),
    "build_cp_metadata_all_ranks": made(
        lambda sizes: cpattn.build_cp_metadata_all_ranks(sizes, cp_size=8), lens
    ),
    "build_dsa_metadata": made(dsa_metadata, lens),
    "kv_to_page_indices": made(lambda slots: transfer.kv_to_page_indices(slots, 16), steps),
    "group_concurrent_contiguous": made(transfer.group_concurrent_contiguous, steps, steps),
    "filter_kv_indices_for_shard_rank": made(shard_share, steps),
    "filter_kv_indices_for_cp_rank": made(cp_share, steps),
    "plan_send_indices": made(send_indices, steps),
    "plan_shard_gather": plan_gather,
    "pad_topk_indices": made(
        lambda x: cpattn.sparse.pad_topk_indices(x, 2 * len(x)),
        lambda n: np.ones((64 * n, 64), np.int32),
    ),
    "registration_regions": made(
        transfer.registration_regions, lambda n: list(range(4096, 4096 + n)), lambda n: [1] * n
    ),
}
