# SPDX-License-Identifier: Apache-2.0
"""Every function that takes tables or lists of indices, in a small call that reads all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cpattn
from cpattn import ForwardMode, TopkTransformMethod, sparse, transfer
from cpattn.transfer import KVEntry, KVLayout

RNG = np.random.default_rng(3)
FAR = 1 << 48  # an address that no plan of a test follows


@dataclass(frozen=True)
class Call:
    """`function` takes the arrays by name, and returns arrays or what compares by value."""

    name: str
    function: Callable[..., Any]
    arrays: dict[str, np.ndarray]
    as_arrays: frozenset[str] = frozenset()  # taken with contiguous rows only
    as_addresses: frozenset[str] = frozenset()  # of 64 bits: any of them is an index

    def __str__(self) -> str:
        return self.name

    def outcome(self, **changes: Any) -> Any:
        """The result, or what was raised; either compares by ==."""
        try:
            return plain(self.function(**self.arrays | changes))
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def plain(result: Any) -> Any:
    """Numbers of arrays with their shapes; other results compare by themselves."""
    if isinstance(result, (tuple, list)):
        return [plain(part) for part in result]
    if isinstance(result, np.ndarray):
        return result.shape, result.tobytes()
    return plain(result.numpy()) if hasattr(result, "numpy") else result


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, np.float32)


# Two sequences of 3 and 2 new tokens, 20 and 9 keys, on pages of 8.
CACHE, QUERIES = normal(9, 8, 2, 16), normal(5, 4, 16)
TABLES = ints([7, 2, 5], [4, 8, -1])
BATCH = {"q_lens": ints(3, 2), "kv_lens": ints(20, 9)}
ATTENTION = {**BATCH, "block_tables": TABLES}
CSR = {
    "q_lens": ints(3, 2),
    "kv_indptr": ints(0, 3, 5),
    "kv_indices": ints(7, 2, 5, 4, 8),
    "last_page_len": ints(4, 1),
}
SIZES = {"page_size": 8, "num_pages": 9, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
METADATA = cpattn.build_cp_metadata([3, 2], [20, 9], cp_rank=0, cp_size=1, strategy="interleave")
BARE = cpattn.build_cp_metadata(
    [3, 2], [20, 9], cp_rank=0, cp_size=1, strategy="interleave", kv_len_convention="bare"
)
KEYS, WEIGHTS = CACHE[:, :, 0], normal(5, 4)
BLOCKS = CACHE[:, :, :1]
RUNNING = {"actual_seq_lengths_query": ints(3, 5)}
SCORES = normal(5, 24)
ROWS = {"lengths": ints(20, 19, 18, 9, 8), "row_starts": ints(0, 1, 2, 3, 4)}
PAGED = {**ROWS, "page_table": TABLES, "cu_seqlens_q": ints(0, 3, 5)}
POSITIONS = ints([3, 19, -1], [0, 17, 8], [2, -1, 1], [5, 8, 0], [7, 1, 6])
FP8_ROWS = RNG.integers(0, 120, (12, 656), np.uint8)  # no NaN
INDEX_CACHE = RNG.integers(0, 120, (3, 4 * 132), np.uint8)
INDEX_KEYS = RNG.integers(0, 120, (4, 128), np.uint8), np.ones(4, np.float32)
SLOTS = ints(3, 11, 0, 6)
LENS = {"extend_lens": ints(3, 2), "seq_lens": ints(20, 9)}
REQ_TO_TOKEN = (2 * RNG.permutation(30)[:, None] + [0, 1]).reshape(3, 20)  # pages of two slots
PAGES = {"src_pages": ints(7, 2, 3), "dst_pages": ints(1, 20, 21)}


def plan_attention(**batch: Any) -> Any:
    plan = cpattn.plan_attention(**batch, **SIZES)
    return plan.page_indptr, plan.page_ids, plan.items


def do_cp_attn_fia(block_tables: Any) -> Any:
    return cpattn.do_cp_attn_fia(
        QUERIES.reshape(5, -1), CACHE, CACHE, METADATA, block_tables=block_tables, page_size=8,
        num_heads=4, num_kv_heads=2, scale=None,
    )  # fmt: skip


def cp_indexer(**tables: Any) -> Any:
    return sparse.cp_indexer_topk(QUERIES, KEYS, WEIGHTS, BARE, **tables, page_size=8, topk=6)


def cp_sparse(**tables: Any) -> Any:
    return sparse.cp_sparse_mla(
        QUERIES, CACHE[:, :, :1], QUERIES, KEYS, WEIGHTS, BARE, **tables, page_size=8, topk=6,
        sm_scale=0.25, d_v=16,
    )  # fmt: skip


def fused_infer_attention(**tables: Any) -> Any:
    # The same sequences, from a cache [blocks, block_size, H].
    cache = CACHE.reshape(9, 8, 32)
    return cpattn.npu.npu_fused_infer_attention_score(
        QUERIES, cache, cache, num_heads=4, num_key_value_heads=2, input_layout="TND",
        block_size=8, scale=0.25, softmax_lse_flag=True, **tables,
    )  # fmt: skip


def lightning_indexer(**tables: Any) -> Any:
    return cpattn.npu.npu_lightning_indexer(
        QUERIES, BLOCKS, WEIGHTS, **tables, layout_query="TND", layout_key="PA_BSND",
        sparse_count=6, return_value=True,
    )  # fmt: skip


def sparse_flash_attention(sparse_indices: Any, **tables: Any) -> Any:
    # Without reshaping an array that a caller laid out on purpose.
    return cpattn.npu.npu_sparse_flash_attention(
        QUERIES, BLOCKS, BLOCKS, sparse_indices[:, None], 0.25, **tables, layout_query="TND",
        layout_kv="PA_BSND", return_softmax_lse=True,
    )  # fmt: skip


def sparse_mla(indices: Any, topk_length: Any) -> Any:
    kv = CACHE[:, :, :1].copy()
    return sparse.flash_mla_sparse_fwd(QUERIES, kv, indices, 0.25, 16, topk_length=topk_length)


def fused_topk(page_table: Any, **rows: Any) -> Any:
    return sparse.fast_topk_transform_fused(
        SCORES, page_table_size_1=page_table, **rows, topk=8, page_size=8
    )


def paged_topk(batch_idx_list: Any, **rows: Any) -> Any:
    method = TopkTransformMethod.PAGED
    return sparse.topk_transform(
        SCORES, 8, method=method, batch_idx_list=batch_idx_list, **rows, page_size=8
    )


def dsa_metadata(**lists: Any) -> Any:
    batch = sparse.build_dsa_metadata(
        **lists, forward_mode=ForwardMode.EXTEND, topk=6, fp8_kv_cache=True,
        prefill_impl="flashmla_sparse", page_size=2,
    )  # fmt: skip
    return {name: plain(np.asarray(value)) for name, value in batch.to_dict().items()}


def write_index_keys(slots: Any) -> Any:
    cache = INDEX_CACHE.copy()
    return written(cache, lambda: sparse.write_index_k_cache(cache, slots, *INDEX_KEYS))


def write_kv(loc: Any) -> Any:
    pool = cpattn.kv.MHATokenToKVPool(
        size=16,
        page_size=4,
        num_layers=1,
        num_kv_heads=2,
        head_dim=8,
        dtype="float32",
        container="numpy",
    )
    rows = QUERIES[:4].reshape(4, -1)[:, :16]
    return written(pool.k_buffer, lambda: pool.set_kv_buffer(0, loc, rows, rows))


def write_codes(loc: Any) -> Any:
    pool = cpattn.kv.MHATokenToKVPool(
        size=16, page_size=4, num_layers=1, num_kv_heads=2, head_dim=8, dtype="int8",
        scale_dtype="float32", container="numpy",
    )  # fmt: skip
    rows = QUERIES[:4].reshape(4, -1)[:, :16]
    return written(pool.k_buffer, lambda: pool.set_kv_buffer(0, loc, rows, rows))


def write_dsa(loc: Any) -> Any:
    pool = cpattn.kv.DSATokenToKVPool(size=16, page_size=4, num_layers=1, container="numpy")
    rows = np.arange(4 * 656, dtype=np.uint8).reshape(4, 656)
    return written(pool.k_buffer, lambda: pool.set_kv_buffer(0, loc, rows))


def write_index_pool(loc: Any) -> Any:
    pool = cpattn.kv.MLATokenToKVPool(
        size=16,
        page_size=4,
        num_layers=1,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        index_head_dim=8,
        dtype="float32",
        container="numpy",
    )
    rows = QUERIES[:4, 0, :8]
    return written(pool.index_k_buffer, lambda: pool.set_index_k_buffer(0, loc, rows))


def written(memory: np.ndarray, call: Callable[[], object]) -> np.ndarray:
    """The memory after the call, which may not have written it if it fails."""
    before = memory.copy()
    try:
        call()
    except Exception:
        assert np.array_equal(memory, before)
        raise
    return memory


def layout(base: int) -> KVLayout:
    return KVLayout([KVEntry(0, "k", False, base, 64 * 512, 512)], 16)


def blocks(plan: Any) -> Any:
    return [plain(array) for array in (plan.src_addrs, plan.dst_addrs, plan.lengths)]


def send_kvcache(src_pages: Any, dst_pages: Any) -> Any:
    args = transfer.KVArgs(kv_data_ptrs=[FAR], kv_data_lens=[64 * 512], kv_item_lens=[512])
    targets = [2 * FAR]
    return transfer.plan_send_kvcache(args, targets, src_pages, dst_pages, pp_size=1, is_mla=True)


def plan_gather(**lists: Any) -> Any:
    return cpattn.kv.plan_shard_gather(
        **lists, placement=cpattn.kv.PageInterleave(shard_size=2, page_size=2), size=12,
        max_prefix_tokens=16, chunk_tokens=8,
    )  # fmt: skip


CALLS = [
    Call("paged_attention", lambda **x: cpattn.paged_attention(
        QUERIES, CACHE, CACHE, **x, return_lse=True), ATTENTION),
    Call("paged_attention, CSR", lambda **x: cpattn.paged_attention(
        QUERIES, CACHE, CACHE, **x, return_lse=True), CSR),
    Call("plan_attention", plan_attention, ATTENTION),
    Call("do_cp_attn_fia", do_cp_attn_fia, {"block_tables": TABLES}),
    Call("cp_indexer_topk", cp_indexer, {"block_tables": TABLES, "prefix_lens": ints(17, 7)}),
    Call("cp_sparse_mla", cp_sparse, {"block_tables": TABLES, "prefix_lens": ints(17, 7)}),
    Call("npu_fused_infer_attention_score", fused_infer_attention, {
        "block_table": TABLES, "actual_seq_lengths": ints(3, 5),
        "actual_seq_lengths_kv": ints(20, 9)}),
    Call("npu_lightning_indexer", lightning_indexer, {
        "block_table": TABLES, **RUNNING, "actual_seq_lengths_key": ints(20, 9)}),
    Call("npu_sparse_flash_attention", sparse_flash_attention, {
        "sparse_indices": POSITIONS, "block_table": TABLES, **RUNNING,
        "actual_seq_lengths_kv": ints(20, 9)}, as_arrays=frozenset({"sparse_indices"})),
    Call("flash_mla_sparse_fwd", sparse_mla, {
        "indices": POSITIONS, "topk_length": ints(3, 3, 2, 3, 3)},
        as_arrays=frozenset({"indices"})),
    Call("fast_topk", lambda **x: sparse.fast_topk(SCORES, topk=8, **x), ROWS),
    Call("fast_topk_transform_fused", fused_topk, PAGED),
    Call("fast_topk_transform_ragged_fused", lambda **x: sparse.fast_topk_transform_ragged_fused(
        SCORES, topk=8, **x), {**ROWS, "topk_indices_offset": ints(0, 0, 0, 20, 20)}),
    Call("topk_transform", paged_topk, {**PAGED, "batch_idx_list": ints(1, 0),
        "lengths": ints(9, 8, 7, 9, 8)}),
    Call("transform_index_page_table_decode", lambda **x: sparse.transform_index_page_table_decode(
        **x, page_size=8), {"page_table": TABLES, "topk_indices": POSITIONS[[0, 3]]}),
    Call("transform_index_page_table_prefill",
        lambda **x: sparse.transform_index_page_table_prefill(**x, page_size=8),
        {"page_table": TABLES, "topk_indices": POSITIONS, "extend_lens_cpu": ints(3, 2)}),
    Call("page_table_to_topk", lambda **x: sparse.page_table_to_topk(**x, topk=24, page_size=8),
        {"page_table": TABLES, "lengths": ints(20, 9)}),
    Call("indexer_logits", lambda **x: sparse.indexer_logits(QUERIES, SCORES[:, :16], WEIGHTS, **x),
        {"ks": ints(0, 1, 0, 2, 0), "ke": ints(3, 3, 5, 4, 1)}),
    Call("indexer_topk", lambda **x: sparse.indexer_topk(
        QUERIES, SCORES[:, :16], WEIGHTS, **x, topk=3),
        {"ks": ints(0, 1, 0, 2, 0), "ke": ints(3, 3, 5, 4, 1)}),
    Call("build_cp_metadata", lambda **x: cpattn.build_cp_metadata(
        **x, cp_rank=1, cp_size=2).to_dict(), {k: 2 * v for k, v in LENS.items()}),
    Call("build_cp_metadata_all_ranks", lambda **x: [
        m.to_dict() for m in cpattn.build_cp_metadata_all_ranks(**x, cp_size=2)],
        {k: 2 * v for k, v in LENS.items()}),
    Call("can_apply_cp", lambda **x: cpattn.can_apply_cp(**x, cp_size=2),
        {"extend_lens": ints(30, 20)}),
    Call("build_dsa_metadata", dsa_metadata, {**LENS, "req_pool_indices": ints(2, 0),
        "req_to_token": REQ_TO_TOKEN}),
    Call("read_index_k_cache", lambda slots: sparse.read_index_k_cache(
        INDEX_CACHE, slots, dtype="int8"), {"slots": SLOTS}),
    Call("write_index_k_cache", write_index_keys, {"slots": SLOTS}),
    Call("dequantize_kv_rows", lambda indices: sparse.dequantize_kv_rows(FP8_ROWS, indices),
        {"indices": SLOTS}),
    Call("MHATokenToKVPool.set_kv_buffer", write_kv, {"loc": SLOTS}),
    Call("MHATokenToKVPool.set_kv_buffer#codes", write_codes, {"loc": SLOTS}),
    Call("DSATokenToKVPool.set_kv_buffer", write_dsa, {"loc": SLOTS}),
    Call("MLATokenToKVPool.set_index_k_buffer", write_index_pool, {"loc": SLOTS}),
    Call("kv_to_page_indices", lambda kv_indices: transfer.kv_to_page_indices(kv_indices, 2),
        {"kv_indices": ints(4, 5, 0, 1, 8)}),
    Call("filter_kv_indices_for_shard_rank", lambda kv_indices:
        transfer.filter_kv_indices_for_shard_rank(
            kv_indices=kv_indices, index_slice=slice(2, 7), shard_rank=1, shard_size=2),
        {"kv_indices": ints(8, 9, 10, 11, 13)}),
    Call("filter_kv_indices_for_cp_rank", lambda kv_indices: transfer.filter_kv_indices_for_cp_rank(
        transfer.KVSender(1, 2), kv_indices, slice(0, 5)), {"kv_indices": ints(8, 9, 5, 3, 6)},
        as_addresses=frozenset({"kv_indices"})),
    Call("plan_send_indices", lambda kv_indices: transfer.plan_send_indices(
        transfer.KVSender(kv_shard_rank=1, kv_shard_size=2), kv_indices, curr_idx=0,
        num_kv_indices=5), {"kv_indices": ints(8, 9, 10, 11, 13)}),
    Call("group_concurrent_contiguous", lambda **x: transfer.group_concurrent_contiguous(**x),
        {"src_indices": ints(1, 2, 7), "dst_indices": ints(4, 5, 6)},
        as_addresses=frozenset({"src_indices", "dst_indices"})),
    Call("plan_send_kvcache", lambda **x: blocks(send_kvcache(**x)), PAGES,
        as_addresses=frozenset({"dst_pages"})),
    Call("plan_kv_transfer", lambda **x: blocks(transfer.plan_kv_transfer(
        layout(FAR), layout(2 * FAR), **x)), PAGES),
    Call("plan_shard_gather", plan_gather, {
        "req_to_token": ints([8, 9, 10, 11, 12, 13], [4, 5, 6, 7, -1, -1]),
        "req_pool_indices": ints(1, 0), "prefix_lens": ints(2, 4), "seq_lens": ints(4, 6)}),
    Call("reference.paged_attention", lambda **x: cpattn.reference.paged_attention(
        QUERIES, CACHE, CACHE, **x), ATTENTION),
    Call("reference.flash_mla_sparse_fwd", lambda **x: cpattn.reference.flash_mla_sparse_fwd(
        QUERIES, CACHE.reshape(-1, 1, 16), **x, sm_scale=0.25, d_v=16),
        {"indices": POSITIONS, "topk_length": ints(3, 3, 2, 3, 3)}),
    Call("reference.indexer_logits", lambda **x: cpattn.reference.indexer_logits(
        QUERIES, SCORES[:, :16], WEIGHTS, **x),
        {"ks": ints(0, 1, 0, 2, 0), "ke": ints(3, 3, 5, 4, 1)}),
]  # fmt: skip

ARGUMENTS = [(call, name) for call in CALLS for name in call.arrays]
JUNK = 0x7FFF_FFF7  # in the gaps: no layout read wrongly goes unseen


def names_of(value: object) -> str:
    return str(value)


def gaps(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.full(shape, JUNK, dtype)


def by_two(x: np.ndarray) -> np.ndarray:
    """A stride of two elements in the last dimension."""
    view = gaps((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)[..., 1::2]
    view[...] = x
    return view


def transposed(x: np.ndarray) -> np.ndarray:
    view = gaps(tuple(n + 2 for n in x.T.shape), x.dtype)[(slice(1, -1),) * x.ndim].T
    view[...] = x
    return view


def same_or_refused(call: Call, name: str, view: Any, expected: object) -> None:
    """Of arrays that must have contiguous rows others are refused."""
    outcome = call.outcome(**{name: view})
    array = np.asarray(view)
    if name in call.as_arrays and array.strides[-1] != array.itemsize:
        assert f"{name} must be contiguous in its last dimension, got stride" in str(outcome)
    else:
        assert outcome == expected
