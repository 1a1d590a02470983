# SPDX-License-Identifier: Apache-2.0
"""Attention of one rank's tokens."""

from __future__ import annotations

import math
from typing import Literal, overload

from .. import _core
from .._containers import empty, need_scales
from .._core import ContextParallelMetadata
from .._types import IndexTable, KVScale, ScoreBias, Tensor, TensorT, Window
from ..attention import default_scale

__all__ = ["attend_rank", "do_cp_attn_fia"]


# fmt: off
@overload
def do_cp_attn_fia(
    q: TensorT, k_cache: Tensor, v_cache: Tensor | None, metadata: ContextParallelMetadata, *,
    block_tables: IndexTable, page_size: int, num_heads: int, num_kv_heads: int,
    scale: float | None = None, causal: bool = True, window: Window = None,
    softcap: float = 0.0, bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    q_rope: Tensor | None = None, k_rope: Tensor | None = None, v_head_dim: int | None = None,
    k_scale: KVScale = None, v_scale: KVScale = None, kv_dtype: str | None = None,
    precise: bool = False, out: TensorT | None = None,
    return_lse: Literal[False] = False,
) -> TensorT: ...
@overload
def do_cp_attn_fia(
    q: TensorT, k_cache: Tensor, v_cache: Tensor | None, metadata: ContextParallelMetadata, *,
    block_tables: IndexTable, page_size: int, num_heads: int, num_kv_heads: int,
    scale: float | None = None, causal: bool = True, window: Window = None,
    softcap: float = 0.0, bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    q_rope: Tensor | None = None, k_rope: Tensor | None = None, v_head_dim: int | None = None,
    k_scale: KVScale = None, v_scale: KVScale = None, kv_dtype: str | None = None,
    precise: bool = False, out: TensorT | None = None,
    return_lse: Literal[True],
) -> tuple[TensorT, TensorT]: ...
@overload
def do_cp_attn_fia(
    q: TensorT, k_cache: Tensor, v_cache: Tensor | None, metadata: ContextParallelMetadata, *,
    block_tables: IndexTable, page_size: int, num_heads: int, num_kv_heads: int,
    scale: float | None = None, causal: bool = True, window: Window = None,
    softcap: float = 0.0, bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    q_rope: Tensor | None = None, k_rope: Tensor | None = None, v_head_dim: int | None = None,
    k_scale: KVScale = None, v_scale: KVScale = None, kv_dtype: str | None = None,
    precise: bool = False, out: TensorT | None = None,
    return_lse: bool,
) -> TensorT | tuple[TensorT, TensorT]: ...
# fmt: on
def do_cp_attn_fia(
    q: TensorT,
    k_cache: Tensor,
    v_cache: Tensor | None,
    metadata: ContextParallelMetadata,
    *,
    block_tables: IndexTable,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float | None = None,
    causal: bool = True,
    window: Window = None,
    softcap: float = 0.0,
    bias: ScoreBias = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    q_rope: Tensor | None = None,
    k_rope: Tensor | None = None,
    v_head_dim: int | None = None,
    k_scale: KVScale = None,
    v_scale: KVScale = None,
    kv_dtype: str | None = None,
    precise: bool = False,
    out: TensorT | None = None,
    return_lse: bool = False,
) -> TensorT | tuple[TensorT, TensorT]:
    """Compute attention of one rank's tokens over the whole paged sequences.

    What sglang's ``AscendAttnBackend.do_cp_attn_fia`` computes, right for any batch size, prefix
    and strategy: the prev and next blocks of all sequences go through one plan. Under interleave
    every local row is a sequence of one query; under contiguous only the prev blocks exist. A row
    has the bits that it has on a single rank, whatever the strategy and the number of ranks.

    `attend_rank` is the same function under a name of its own; messages say `do_cp_attn_fia`.

    Parameters
    ----------
    q : tensor [rows, num_heads * head_dim], float32, float16 or bfloat16
        This rank's rows in the order of the metadata (all prev blocks, then all next blocks).
        Rows beyond the metadata's are padding: never read, zeros come out.
    k_cache, v_cache : tensors of the dtype of q, or of codes of 8 bits, contiguous
        Any shape with num_pages * page_size * num_kv_heads * dim elements, token slots first. With
        all axes, [num_pages, page_size, num_kv_heads, dim] or [num_slots, num_kv_heads, dim], only
        the last one has to be contiguous, so that some heads of a larger cache will do.
        They hold the complete sequences, the new tokens included. Without `v_cache` (None) the
        first `v_head_dim` elements of the keys are the values, as in the latent cache of MLA.
    metadata : ContextParallelMetadata
        With kv lengths that count the prefix ("baked"), unless there is none.
    block_tables : ints [batch, pages]
        The pages of each sequence, its prefix first.
    page_size : int
        Tokens of a page.
    num_heads, num_kv_heads : int
        Heads of the queries, a multiple of those of keys and values.
    scale : float, default 1/sqrt(head_dim)
        Must be given for head_dim > 256; head_dim includes that of `q_rope`.
    causal, window, softcap, alibi_slopes, relative_bias, sinks
        As in `paged_attention`. Without `causal` a token sees its whole sequence, and padding
        tokens of the metadata are tokens of the last one.
    bias, custom_mask, packed_custom_mask : tensors, optional
        As in `paged_attention`, for the whole sequences: ``extend_lens[s]`` rows of
        ``prefix_lens[s] + extend_lens[s]`` values for each sequence, lengths as in the metadata.
        Every rank is given the same, and takes the rows of its tokens.
    q_rope, k_rope : tensors, optional
        The last dimensions of queries [rows, num_heads * rope_dim] and keys, where they are stored
        apart; `k_rope` is as `k_cache`.
    v_head_dim : int, optional
        Elements of a value, where there is no `v_cache`.
    k_scale, v_scale, kv_dtype
        As in `paged_attention`, of caches of codes of 8 bits; scales of tokens are in pages
        [num_pages, page_size, num_kv_heads] or slots. The scale of keys is that of `k_rope`, too,
        and without `v_cache` that of the values.
    precise : bool
        Where bfloat16 is rounded, as in `paged_attention` with `batch_invariant`.
    out : tensor [rows, num_heads * v_head_dim] of the dtype of q, optional
        Written and returned; must not overlap an input.
    return_lse : bool
        Whether to return `lse`, too.

    Returns
    -------
    out : tensor [rows, num_heads * v_head_dim], container and dtype of q
    lse : tensor [rows, num_heads], float32; only with ``return_lse``
        Natural logarithm; -inf for padding.

    Raises
    ------
    TypeError
        For what is no tensor or no metadata, and dtypes that do not fit.
    ValueError
        For fewer rows than the metadata has, bare metadata of a batch with a prefix, a kv length
        beyond the block table, page ids outside the cache, options that exclude each other, and
        shapes that do not fit.

    Examples
    --------
    The first of two ranks has tokens 0, 1, 6 and 7 of eight behind a prefix of eight:

    >>> import numpy as np, cpattn
    >>> plan = cpattn.build_cp_metadata([8], [16], cp_rank=0, cp_size=2)
    >>> random = np.random.default_rng(0)
    >>> q, cache = (random.random(s).astype(np.float32) for s in [(8, 32), (4, 8, 1, 16)])
    >>> out = cpattn.do_cp_attn_fia(plan.shard(q), cache, cache, plan, block_tables=[[2, 0]],
    ...                             page_size=8, num_heads=2, num_kv_heads=1)
    >>> whole = cpattn.paged_attention(q.reshape(8, 2, 16), cache, cache, q_lens=[8],
    ...                                kv_lens=[16], block_tables=[[2, 0]])
    >>> bool(np.allclose(out, whole[[0, 1, 6, 7]].reshape(4, 32), atol=1e-6))
    True
    """
    function = "do_cp_attn_fia"
    rows, columns = _core.shape_of(q, function, "q", 2)
    num_heads = _core.integer(num_heads, function, "num_heads")
    heads = max(num_heads, 0)  # the core refuses those below 1
    return_lse = _core.flag(return_lse, function, "return_lse")
    check_scales(k_cache, v_cache, k_scale, v_scale, kv_dtype)
    if scale is None:
        rope_columns = 0 if q_rope is None else _core.shape_of(q_rope, function, "q_rope", 2)[1]
        scale = default_scale(function, (columns + rope_columns) // max(heads, 1))
    if out is None:
        out_columns = _out_columns(function, columns, heads, k_cache, v_cache, v_head_dim)
        out = empty(function, q, (rows, out_columns))
    lse = empty(function, q, (rows, heads), "float32") if return_lse else None
    _core.do_cp_attn_fia(
        q, k_cache, v_cache, metadata, block_tables, page_size, num_heads, num_kv_heads, scale,
        causal, window, softcap, (bias, alibi_slopes, relative_bias), sinks, custom_mask,
        packed_custom_mask, q_rope, k_rope,
        v_head_dim, k_scale, v_scale, kv_dtype, precise, out, lse,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def check_scales(
    k_cache: Tensor,
    v_cache: Tensor | None,
    k_scale: KVScale,
    v_scale: KVScale,
    kv_dtype: str | None,
) -> None:
    """Refuse int8 without scales; values that are a part of the keys have the scale of these."""
    scales = {"k_scale": k_scale, "v_scale": k_scale if v_cache is None else v_scale}
    need_scales("do_cp_attn_fia", k_cache, kv_dtype, **scales)


def _out_columns(
    function: str,
    columns: int,
    heads: int,
    k_cache: Tensor,
    v_cache: Tensor | None,
    v_head_dim: int | None,
) -> int:
    """num_heads * v_head_dim, or anything where the core refuses the arguments."""
    keys = math.prod(_core.shape_of(k_cache, function, "k_cache"))
    if v_cache is not None:
        shape = _core.shape_of(v_cache, function, "v_cache")
        if keys:
            return columns * math.prod(shape) // keys
        return heads * min(shape[-1], columns) if len(shape) >= 3 else columns  # of an empty pool
    if v_head_dim is None:
        return columns
    return heads * min(max(_core.integer(v_head_dim, function, "v_head_dim"), 0), columns)


attend_rank = do_cp_attn_fia
