# SPDX-License-Identifier: Apache-2.0
"""Registers the library's tensor functions as operators of torch when imported.

    import cpattn.integrations.torch_ops
    out, lse = torch.ops.cpattn.paged_attention(q, k_cache, v_cache, q_lens=..., ...)

Each ``torch.ops.cpattn.x`` has the arguments of ``cpattn.x``, in the same order and with the same
defaults, and always returns all results. Lengths, tables and other integer arrays are int32 or
int64 tensors, as numbers would be constants of a graph, which every change recompiles. Scales of
caches are numbers, ``k_scale`` and ``v_scale``, or tensors, ``k_scales`` and ``v_scales``. A bias
is one tensor, and ``causal`` one bool, for all sequences. A two-sided window is two arguments:
``window``, the left side, None for no limit, and ``window_right``, the right side, -1 for no limit.
``torch.ops.cpattn.x.out`` writes into tensors given as keywords with the names of the results.

Operators run on CPU tensors, trace under `torch.compile` without graph breaks and with dynamic
shapes, and have no backward: in grad mode, an argument that requires a gradient raises TypeError.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from .. import _core
from ..attention import default_scale, paged_attention
from ..context_parallel.attention import check_scales, do_cp_attn_fia
from ..context_parallel.metadata import build_cp_metadata
from ..merge import merge_state
from ..sparse.index_k import hadamard_transform
from ..sparse.indexer import indexer_logits, indexer_topk
from ..sparse.kv_rows import ROW_BYTES, dequantize_kv_rows, quantize_kv_rows
from ..sparse.sglang_0_5_23 import fast_topk
from ..sparse.sparse_mla import flash_mla_sparse_fwd
from ..sparse.split_norm import fused_split_qk_norm, split_qk_norm
from ._torch_library import SCALES, Operators, with_scales

Tensor = torch.Tensor

_operators = Operators("cpattn")

_BIASES = "Tensor? bias=None, Tensor? alibi_slopes=None, Tensor? relative_bias=None"


# Dense attention.


def _with_window(options: dict[str, Any]) -> dict[str, Any]:
    """Combine ``window`` and ``window_right`` into a pair, if the latter is given."""
    right = options.pop("window_right", None)
    if right is not None:
        options["window"] = (options.get("window"), None if right == -1 else right)
    return options


def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    scaled = _with_window(with_scales("paged_attention", options))
    return paged_attention(q, k_cache, v_cache, **scaled, return_lse=True)


def _paged_attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:2], v_cache.shape[-1]))
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


def _paged_attention_out(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> None:
    paged_attention(q, k_cache, v_cache, **_with_window(with_scales("paged_attention", options)))


_operators.define_with_out(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, *, Tensor q_lens, "
    "Tensor? kv_lens=None, Tensor? first_positions=None, Tensor? block_tables=None, "
    "Tensor? kv_indptr=None, Tensor? kv_indices=None, Tensor? last_page_len=None, "
    f"SymInt? page_size=None, str kv_layout='NHD', {SCALES}, float? scale=None, bool causal=True, "
    f"SymInt? window=None, SymInt? window_right=None, float softcap=0.0, {_BIASES}, "
    "Tensor? sinks=None, "
    "Tensor? custom_mask=None, Tensor? packed_custom_mask=None, bool allow_short_kv=False, "
    "bool batch_invariant=False, bool precise=False, int? num_threads=None)",
    "out lse",
    _paged_attention,
    _paged_attention_out,
    _paged_attention_fake,
)


def _metadata(options: dict[str, Any], page_size: int) -> _core.ContextParallelMetadata:
    """Build metadata from the arguments that describe the batch, and remove these arguments."""
    keys = ("cp_rank", "cp_size", "strategy", "num_tokens", "weights")
    given = {key: options.pop(key) for key in keys if key in options}
    given["page_size"] = page_size if options.pop("whole_pages", False) else None
    return build_cp_metadata(options.pop("extend_lens"), options.pop("seq_lens"), **given)


def _do_cp_attn_fia(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, **options: Any) -> Any:
    batch = _with_window(with_scales("do_cp_attn_fia", options))
    metadata = _metadata(batch, options["page_size"])
    return do_cp_attn_fia(q, k_cache, v_cache, metadata, **options, return_lse=True)


def _do_cp_attn_fia_out(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    num_heads: int,
    scale: float | None,
    causal: bool = True,
    window: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    v_head_dim: int | None = None,
    precise: bool = False,
    block_tables: Tensor,
    page_size: int,
    num_kv_heads: int,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> None:
    batch = with_scales("do_cp_attn_fia", options)
    around = _with_window({"window": window, "window_right": window_right})["window"]
    k_scale, v_scale, kv_dtype = (batch.pop(x, None) for x in ("k_scale", "v_scale", "kv_dtype"))
    check_scales(k_cache, v_cache, k_scale, v_scale, kv_dtype)
    if scale is None:
        columns = q.shape[-1] + (0 if q_rope is None else q_rope.shape[-1])
        scale = default_scale("do_cp_attn_fia", columns // max(num_heads, 1))
    _core.do_cp_attn_fia(
        q, k_cache, v_cache, _metadata(batch, page_size), block_tables, page_size, num_heads,
        num_kv_heads, scale, causal, around, softcap, (bias, alibi_slopes, relative_bias), sinks,
        custom_mask, packed_custom_mask, q_rope, k_rope, v_head_dim, k_scale, v_scale, kv_dtype,
        precise, out, lse,
    )  # fmt: skip


def _do_cp_attn_fia_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    num_heads: int,
    v_head_dim: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    rows, columns = q.shape
    if v_cache is not None:
        columns = columns * v_cache.numel() // k_cache.numel()
    elif v_head_dim is not None:  # the core refuses a call with neither
        columns = num_heads * v_head_dim
    return q.new_empty((rows, columns)), q.new_empty((rows, num_heads), dtype=torch.float32)


_operators.define_with_out(
    "do_cp_attn_fia(Tensor q, Tensor k_cache, Tensor? v_cache, *, Tensor extend_lens, "
    "Tensor? seq_lens, int cp_rank, int cp_size, Tensor block_tables, SymInt page_size, "
    "SymInt num_heads, SymInt num_kv_heads, float? scale, bool causal=True, "
    f"SymInt? window=None, SymInt? window_right=None, float softcap=0.0, {_BIASES}, "
    "Tensor? sinks=None, Tensor? custom_mask=None, Tensor? packed_custom_mask=None, "
    "Tensor? q_rope=None, Tensor? k_rope=None, SymInt? v_head_dim=None, "
    f"{SCALES}, str strategy='zigzag', SymInt? num_tokens=None, float[]? weights=None, "
    "bool whole_pages=False, bool precise=False)",
    "out lse",
    _do_cp_attn_fia,
    _do_cp_attn_fia_out,
    _do_cp_attn_fia_fake,
)


def _merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    merge_state(out_a, lse_a, out_b, lse_b)


_operators.define(
    "merge_state(Tensor(a!) out_a, Tensor(b!) lse_a, Tensor out_b, Tensor lse_b) -> ()",
    _merge_state,
    lambda out_a, lse_a, out_b, lse_b: None,
)


# The indexer and its selection.


def _indexer_logits_out(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    *,
    k_scale: Tensor | None = None,
    out: Tensor,
) -> None:
    _check_columns("indexer_logits", out, k.shape[0])  # the core takes more
    _core.indexer_logits(q, k, weights, ks, ke, k_scale, out)


def _check_columns(function: str, out: Tensor, columns: int) -> None:
    if out.shape[-1:] != (columns,):
        raise ValueError(f"{function}: out must have {columns} columns, got {list(out.shape)}")


_operators.define_with_out(
    "indexer_logits(Tensor q, Tensor k, Tensor weights, Tensor ks, Tensor ke, *, "
    "Tensor? k_scale=None)",
    "out",
    indexer_logits,
    _indexer_logits_out,
    lambda q, k, *args, **options: q.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32),
)


def _indexer_topk_out(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    *,
    topk: int,
    k_scale: Tensor | None = None,
    sorted: bool = True,
    out: Tensor,
) -> None:
    _check_columns("indexer_topk", out, topk)
    _core.indexer_topk(q, k, weights, ks, ke, k_scale, sorted, out)


_operators.define_with_out(
    "indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor ks, Tensor ke, *, SymInt topk, "
    "Tensor? k_scale=None, bool sorted=True)",
    "out",
    indexer_topk,
    _indexer_topk_out,
    lambda q, *args, topk, **options: q.new_empty((q.shape[0], topk), dtype=torch.int32),
)


def _fast_topk_out(
    score: Tensor,
    lengths: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
    *,
    sorted: bool = True,
    out: Tensor,
) -> None:
    _core.fast_topk(score, lengths, topk, row_starts, sorted, out)


_operators.define_with_out(
    "fast_topk(Tensor score, Tensor lengths, SymInt topk, Tensor? row_starts=None, *, "
    "bool sorted=True)",
    "out",
    fast_topk,
    _fast_topk_out,
    lambda score, lengths, topk, *args, **options: score.new_empty(
        (score.shape[0], topk), dtype=torch.int32
    ),
)


def _hadamard_transform_out(x: Tensor, scale: float | None = None, *, out: Tensor) -> None:
    if scale is None:
        scale = max((1, *x.shape[-1:])) ** -0.5
    _core.hadamard_transform(x, scale, out)


_operators.define_with_out(
    "hadamard_transform(Tensor x, float? scale=None)",
    "out",
    hadamard_transform,
    _hadamard_transform_out,
    lambda x, scale=None: x.new_empty(x.shape),
)


# Latent attention.


def _quantize_kv_rows_out(nope: Tensor, rope: Tensor, *, out: Tensor) -> None:
    quantize_kv_rows(nope, rope, out=out)


_operators.define_with_out(
    "quantize_kv_rows(Tensor nope, Tensor rope)",
    "out",
    quantize_kv_rows,
    _quantize_kv_rows_out,
    lambda nope, rope: nope.new_empty((nope.shape[0], 1, ROW_BYTES), dtype=torch.uint8),
)


def _dequantize_kv_rows_out(rows: Tensor, indices: Tensor | None = None, *, out: Tensor) -> None:
    dequantize_kv_rows(rows, indices, out=out)


def _dequantize_kv_rows_fake(rows: Tensor, indices: Tensor | None = None) -> Tensor:
    count = math.prod(rows.shape[:-1]) if indices is None else indices.shape[0]
    return rows.new_empty((count, 1, 576), dtype=torch.bfloat16)


_operators.define_with_out(
    "dequantize_kv_rows(Tensor rows, Tensor? indices=None)",
    "out",
    dequantize_kv_rows,
    _dequantize_kv_rows_out,
    _dequantize_kv_rows_fake,
)


def _flash_mla_sparse_fwd_out(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    num_threads: int | None = None,
    out: Tensor,
    max_logits: Tensor,
    lse: Tensor,
) -> None:
    _core.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, num_threads, out, max_logits, lse
    )


def _flash_mla_sparse_fwd_fake(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, *args: Any, **kw: Any
) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty((*q.shape[:2], d_v))
    max_logits, lse = (q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2))
    return out, max_logits, lse


_operators.define_with_out(
    "flash_mla_sparse_fwd(Tensor q, Tensor kv, Tensor indices, float sm_scale, SymInt d_v=512, "
    "Tensor? attn_sink=None, Tensor? topk_length=None, *, int? num_threads=None)",
    "out max_logits lse",
    flash_mla_sparse_fwd,
    _flash_mla_sparse_fwd_out,
    _flash_mla_sparse_fwd_fake,
)


def _split_fake(
    with_latent: bool,
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    **options: Any,
) -> tuple[Tensor, ...]:
    rows = x.shape[0]
    columns = [kv_lora_rank, qk_rope_head_dim]
    columns += [kv_lora_rank + qk_rope_head_dim] if with_latent else []
    return x.new_empty((rows, q_lora_rank)), *(x.new_empty((rows, 1, n)) for n in columns)


def _split_qk_norm_out(
    x: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    *,
    q_eps: float,
    kv_eps: float,
    q_bias: Tensor | None = None,
    kv_bias: Tensor | None = None,
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    latent_cache: Tensor | None = None,
) -> None:
    split = _core.split_qk_norm if latent_cache is not None else _core.fused_split_qk_norm
    split(
        x, q_weight, kv_weight, q_bias, kv_bias, q_lora_rank, kv_lora_rank,
        qk_rope_head_dim, q_eps, kv_eps, q, k_nope, k_pe, latent_cache,
    )  # fmt: skip


def _fused_split_qk_norm_out(*args: Any, eps: float = 1e-6, **options: Any) -> None:
    _split_qk_norm_out(*args, q_eps=eps, kv_eps=eps, **options)


_PROJECTION = (
    "Tensor x, Tensor q_weight, Tensor kv_weight, SymInt q_lora_rank, SymInt kv_lora_rank, "
    "SymInt qk_rope_head_dim"
)

_operators.define_with_out(
    f"split_qk_norm({_PROJECTION}, *, float q_eps, float kv_eps, Tensor? q_bias=None, "
    "Tensor? kv_bias=None)",
    "q k_nope k_pe latent_cache",
    split_qk_norm,
    _split_qk_norm_out,
    partial(_split_fake, True),
)
_operators.define_with_out(
    f"fused_split_qk_norm({_PROJECTION}, *, float eps=1e-6, Tensor? q_bias=None, "
    "Tensor? kv_bias=None)",
    "q k_nope k_pe",
    fused_split_qk_norm,
    _fused_split_qk_norm_out,
    partial(_split_fake, False),
)
