# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache."""

from __future__ import annotations

import math

from . import _core
from ._containers import Indices, Tensor, empty


def default_scale(function: str, head_dim: int) -> float:
    """1/sqrt(head_dim), refused where it would be wrong: absorbed MLA scales by another width."""
    if head_dim > 256:
        raise ValueError(
            f"{function}: scale must be given for head_dim > 256, got head_dim {head_dim} "
            "(absorbed MLA scales by the unabsorbed width)"
        )
    return 1.0 / math.sqrt(max(head_dim, 1))  # the core refuses those below


def _outputs(
    function: str,
    q: Tensor,
    rows: int,
    num_heads: int,
    v_head_dim: int,
    out: Tensor | None,
    lse: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    return_lse = _core.flag(return_lse, function, "return_lse")
    if out is None:
        out = empty(function, q, (rows, num_heads, v_head_dim))
    if lse is None and return_lse:
        lse = empty(function, q, (rows, num_heads), "float32")
    return out, lse


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_lens: Indices,
    kv_lens: Indices | None = None,
    block_tables: Indices | None = None,
    kv_indptr: Indices | None = None,
    kv_indices: Indices | None = None,
    last_page_len: Indices | None = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    allow_short_kv: bool = False,
    batch_invariant: bool = False,
    num_threads: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ragged queries over keys and values in pages.

    For query ``i`` of sequence ``s``, at position ``p = kv_lens[s] - q_lens[s] + i``::

        visible = [j for j in range(kv_lens[s]) if (not causal or j <= p)
                   and (window is None or j >= p - window) and mask(i, j)]
        score = softcap * tanh(scale * q @ k[j] / softcap)      # softcap 0: scale * q @ k[j]
        out = sum(exp(score[j]) * v[j]) / (sum(exp(score[j])) + exp(sinks[h]))
        lse = log(sum(exp(score[j])))

    Query head ``h`` reads KV head ``h // (num_heads // num_kv_heads)``. A row that sees no key
    gives zeros and LSE -inf; what it does not see never matters, NaN included. Accumulation is in
    float32 with one rounding at the end.

    Parameters
    ----------
    q : float32, float16 or bfloat16 tensor, shape [num_tokens, num_heads, head_dim]
        New tokens, sequence after sequence. head_dim is a multiple of 16 up to 576.
    k_cache, v_cache : tensors of the dtype of q
        [num_pages, page_size, num_kv_heads, dim] ("NHD"), [num_pages, num_kv_heads, page_size,
        dim] ("HND"), or [num_slots, num_kv_heads, dim] with `page_size`. Any strides with a
        contiguous last dimension; never copied. `v_cache` may have another dim.
    q_lens : ints, shape [batch]
        New tokens per sequence; zero is allowed.
    kv_lens : ints, shape [batch]
        Cached tokens per sequence, the new ones included: under `causal` at least `q_lens`.
    block_tables : ints, shape [batch, >= ceil(max(kv_lens) / page_size)]
        Page ids; entries beyond a sequence's own pages are never read.
    kv_indptr, kv_indices, last_page_len : ints
        The CSR form of the same, instead of `kv_lens` and `block_tables`.
    scale : float, default 1/sqrt(head_dim)
        Must be given for head_dim > 256.
    window : int, optional
        Keys before a token's own that it sees, itself not counted; needs ``causal``.
    softcap : float
        0 for none, else from 1e-37 to 1e37.
    sinks : float32 tensor, shape [num_heads], optional
        One logit per head that takes weight but has no value.
    custom_mask : bool tensor, sum(q_len * kv_len) elements, optional
        True = visible, row-major per sequence. Applied on top of `causal` and `window`; pass
        ``causal=False`` to let it decide alone.
    allow_short_kv : bool
        Under `causal`, take a sequence of more queries than keys: its last query stands at the last
        key, and the first ones, before key 0, see nothing. An error otherwise, because it mostly
        means that the new tokens were not counted in `kv_lens`.
    batch_invariant : bool
        Make a row's result bitwise independent of the rest of the batch, of chunking and of the
        context-parallel split. Else sequences of up to 16 new tokens are divided along their
        keys, and read at the speed of memory if they have few rows; how is decided by the lengths
        of the batch alone, so results never depend on the number of threads.
    num_threads : int, optional
        Default: `set_num_threads`, ``CPATTN_NUM_THREADS``, or all CPUs. 1 is the caller's thread
        alone. The result does not depend on it.
    out, lse : tensors, optional
        Written and returned; must not overlap an input.

    Returns
    -------
    out : tensor in the container and dtype of q, shape [num_tokens, num_heads, v_head_dim]
    lse : float32 tensor, shape [num_tokens, num_heads], with ``return_lse``
        Natural logarithm, sinks not included.

    Raises
    ------
    ValueError
        For lengths, shapes, page ids or tables that do not fit, before anything is written.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q = np.ones((3, 2, 16), np.float32)
    >>> cache = np.ones((4, 8, 1, 16), np.float32)     # four pages of eight tokens
    >>> out = cpattn.paged_attention(q, cache, cache, q_lens=[3], kv_lens=[10],
    ...                              block_tables=[[2, 0]])
    >>> out.shape, float(out[0, 0, 0])
    ((3, 2, 16), 1.0)
    """
    function = "paged_attention"
    rows, num_heads, head_dim = _core.shape_of(q, function, "q", 3)
    v_head_dim = (0, *_core.shape_of(v_cache, function, "v_cache"))[-1]
    if scale is None:
        scale = default_scale(function, head_dim)
    out, lse = _outputs(function, q, rows, num_heads, v_head_dim, out, lse, return_lse)
    _core.paged_attention(
        q, k_cache, v_cache, q_lens, kv_lens, block_tables, kv_indptr, kv_indices, last_page_len,
        page_size, kv_layout, scale, causal, window, softcap, sinks, custom_mask,
        allow_short_kv, batch_invariant, num_threads, out, lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def plan_attention(
    *,
    q_lens: Indices,
    kv_lens: Indices,
    block_tables: Indices,
    page_size: int,
    num_pages: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    causal: bool = True,
    window: int | None = None,
    custom_mask: Tensor | None = None,
    allow_short_kv: bool = False,
    batch_invariant: bool = False,
    num_threads: int | None = None,
) -> _core.AttentionPlan:
    """Divide a batch into work items, once for all layers; see `paged_attention`.

    Everything that can be checked without the tensors is checked here, page ids included, so that
    `run_attention` only compares shapes.

    Returns
    -------
    AttentionPlan
        A value: comparable, printable, with read-only array views.
    """
    return _core.plan_attention(
        q_lens, kv_lens, block_tables, page_size, num_pages, num_heads, num_kv_heads, head_dim,
        head_dim if v_head_dim is None else v_head_dim, causal, window, custom_mask,
        allow_short_kv, batch_invariant, num_threads,
    )  # fmt: skip


def run_attention(
    plan: _core.AttentionPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_layout: str = "NHD",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run a plan on one layer's tensors; arguments and results as in `paged_attention`."""
    function = "run_attention"
    if not isinstance(plan, _core.AttentionPlan):
        raise TypeError(f"{function}: plan must be an AttentionPlan, got {type(plan).__name__}")
    rows, num_heads, _ = _core.shape_of(q, function, "q", 3)
    if scale is None:
        scale = default_scale(function, plan.head_dim)
    out, lse = _outputs(function, q, rows, num_heads, plan.v_head_dim, out, lse, return_lse)
    _core.run_attention(plan, q, k_cache, v_cache, kv_layout, scale, softcap, sinks, out, lse)
    return (out, lse) if return_lse else out


def do_cp_attn_fia(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: _core.ContextParallelMetadata,
    *,
    block_tables: Indices,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    scale: float | None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Context-parallel attention of one rank's tokens over the whole paged sequences.

    What sglang's ``AscendAttnBackend.do_cp_attn_fia`` computes, right for any batch size, prefix
    and strategy: the prev and next blocks of all sequences go through one plan. Under interleave
    every local row is a sequence of one query; under contiguous only the prev blocks exist.

    Parameters
    ----------
    q : tensor, shape [rows, num_heads * head_dim]
        This rank's rows in the order of the metadata (all prev blocks, then all next blocks).
        Rows beyond the metadata's are padding: never read, zeros come out.
    k_cache, v_cache : contiguous tensors of the dtype of q
        Any shape with num_pages * page_size * num_kv_heads * dim elements, token slots first.
        They hold the complete sequences, the new tokens included.
    metadata : ContextParallelMetadata
        With kv lengths that count the prefix ("baked"), unless there is none.
    block_tables : ints, shape [batch, pages]
        The pages of each sequence, its prefix first.
    scale : float or None
        None: 1/sqrt(head_dim), refused for head_dim > 256.

    Returns
    -------
    out : tensor, shape [rows, num_heads * v_head_dim]
    lse : float32 tensor, shape [rows, num_heads], with ``return_lse``

    Raises
    ------
    ValueError
        For fewer rows than the metadata has, bare metadata of a batch with a prefix, a kv length
        beyond the block table, page ids outside the cache, and shapes that do not fit.
    """
    function = "do_cp_attn_fia"
    rows, columns = _core.shape_of(q, function, "q", 2)
    num_heads = _core.integer(num_heads, function, "num_heads")
    heads = max(num_heads, 0)  # the core refuses those below 1
    return_lse = _core.flag(return_lse, function, "return_lse")
    if scale is None:
        scale = default_scale(function, columns // max(heads, 1))
    keys = math.prod(_core.shape_of(k_cache, function, "k_cache"))
    values = math.prod(_core.shape_of(v_cache, function, "v_cache"))
    if out is None:
        # The core refuses what does not divide.
        out = empty(function, q, (rows, columns * values // keys if keys else columns))
    lse = empty(function, q, (rows, heads), "float32") if return_lse else None
    _core.do_cp_attn_fia(
        q, k_cache, v_cache, metadata, block_tables, page_size, num_heads, num_kv_heads, scale,
        out, lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets, in place into the first.

    Parameters
    ----------
    out_a, out_b : float32, float16 or bfloat16 tensors, shape [num_tokens, num_heads, head_dim]
        Normalised partial outputs. ``out_a`` is overwritten.
    lse_a, lse_b : float32 tensors, shape [num_tokens, num_heads]
        Natural-log sums of exponentials; -inf marks a row without keys, whose numbers are ignored.

    Returns
    -------
    out_a, lse_a
    """
    _core.merge_state(out_a, lse_a, out_b, lse_b)
    return out_a, lse_a
