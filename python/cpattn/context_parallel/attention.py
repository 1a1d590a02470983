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

    The result is that of sglang's ``AscendAttnBackend.do_cp_attn_fia``, correct for any batch size,
    prefix and strategy: one plan has the prev and next blocks of all sequences. With interleave,
    every local row is a sequence of one query; with contiguous, only the prev blocks exist. A row
    has the same bits as on a single rank, for any strategy and number of ranks.

    `attend_rank` is another name of this function; messages say `do_cp_attn_fia`.

    Parameters
    ----------
    q : tensor [rows, num_heads * head_dim], float32, float16 or bfloat16
        This rank's rows in the order of the metadata (all prev blocks, then all next blocks).
        Further rows are padding: they are never read, and their results are zeros.
    k_cache, v_cache : tensors of the dtype of q, or of codes of 8 bits, contiguous
        Any shape with num_pages * page_size * num_kv_heads * dim elements, token slots first. With
        all axes, [num_pages, page_size, num_kv_heads, dim] or [num_slots, num_kv_heads, dim], only
        the last axis must be contiguous, so a slice of the heads of a larger cache works. The
        caches hold the complete sequences, new tokens included. If `v_cache` is None, the first
        `v_head_dim` elements of the keys are the values, as in the latent cache of MLA.
    metadata : ContextParallelMetadata
        Metadata with kv lengths that count the prefix ("baked"), unless there is no prefix.
    block_tables : ints [batch, pages]
        Pages of each sequence, its prefix first.
    page_size : int
        Tokens per page.
    num_heads, num_kv_heads : int
        Query heads, a multiple of the KV heads.
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores; required for head_dim > 256, rope_dim of `q_rope` included.
    causal, window, softcap, alibi_slopes, relative_bias, sinks
        See `paged_attention`. Without `causal` a token sees its whole sequence, and padding tokens
        of the metadata count as tokens of the last sequence.
    bias, custom_mask, packed_custom_mask : tensors, optional
        See `paged_attention`; for the whole sequences: ``extend_lens[s]`` rows of
        ``prefix_lens[s] + extend_lens[s]`` values for each sequence, with lengths of the metadata.
        Every rank passes the same tensors and reads the rows of its tokens.
    q_rope, k_rope : tensors, optional
        The last dimensions of queries [rows, num_heads * rope_dim] and keys, if stored apart;
        `k_rope` has the form of `k_cache`.
    v_head_dim : int, optional
        Elements of a value; required without `v_cache`.
    k_scale, v_scale, kv_dtype
        Scales and dtype of 8-bit caches, as in `paged_attention`; scales of tokens are in pages
        [num_pages, page_size, num_kv_heads] or slots. `k_scale` also applies to `k_rope` and,
        without `v_cache`, to the values.
    precise : bool
        Rounding of bfloat16, as in `paged_attention` with `batch_invariant`.
    out : tensor [rows, num_heads * v_head_dim] of the dtype of q, optional
        Receives the result and is returned; must not overlap an input.
    return_lse : bool
        Whether to return `lse`, too.

    Returns
    -------
    out : tensor [rows, num_heads * v_head_dim], container and dtype of q
    lse : tensor [rows, num_heads], float32; only with ``return_lse``
        Natural log-sum-exp; -inf for padding.

    Raises
    ------
    TypeError
        If an argument is no tensor or no metadata, or dtypes do not fit.
    ValueError
        If there are fewer rows than in the metadata, metadata of a batch with a prefix are bare, a
        kv length exceeds the block table, page ids are outside the cache, options exclude each
        other, or shapes do not fit.

    Examples
    --------
    Rank 0 of two has tokens 0, 1, 6 and 7 of eight new tokens after a prefix of eight:

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
    heads = max(num_heads, 0)  # the core refuses num_heads < 1
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
    """Refuse int8 without scales; values that are part of the keys have the scale of the keys."""
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
    """Return num_heads * v_head_dim, or any number if the core refuses the arguments."""
    keys = math.prod(_core.shape_of(k_cache, function, "k_cache"))
    if v_cache is not None:
        shape = _core.shape_of(v_cache, function, "v_cache")
        if keys:
            return columns * math.prod(shape) // keys
        return heads * min(shape[-1], columns) if len(shape) >= 3 else columns  # empty pool
    if v_head_dim is None:
        return columns
    return heads * min(max(_core.integer(v_head_dim, function, "v_head_dim"), 0), columns)


attend_rank = do_cp_attn_fia
