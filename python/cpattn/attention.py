# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache."""

from __future__ import annotations

from typing import Literal, overload

from . import _core
from ._containers import empty
from ._core import AttentionPlan
from ._types import Flags, IndexTable, Indices, KVScale, ScoreBias, Tensor, TensorT, Window
from .profiling.calls import announced


def default_scale(function: str, head_dim: int) -> float:
    """Return 1/sqrt(head_dim); ValueError for head_dim > 256, as absorbed MLA scales otherwise."""
    return _core.default_scale(function, head_dim)


def _outputs(
    function: str,
    q: TensorT,
    rows: int,
    num_heads: int,
    v_head_dim: int,
    out: TensorT | None,
    lse: TensorT | None,
    return_lse: bool,
) -> tuple[TensorT, TensorT | None]:
    return_lse = _core.flag(return_lse, function, "return_lse")
    if out is None:
        out = empty(function, q, (rows, num_heads, v_head_dim))
    if lse is None and return_lse:
        lse = empty(function, q, (rows, num_heads), "float32")
    return out, lse


# fmt: off
@overload
def paged_attention(
    q: TensorT, k_cache: Tensor, v_cache: Tensor, *,
    q_lens: Indices, kv_lens: Indices | None = None, first_positions: Indices | None = None,
    block_tables: IndexTable | None = None,
    kv_indptr: Indices | None = None, kv_indices: Indices | None = None,
    last_page_len: Indices | None = None, page_size: int | None = None, kv_layout: str = "NHD",
    k_scale: KVScale = None, v_scale: KVScale = None, kv_dtype: str | None = None,
    scale: float | None = None, causal: Flags = True, window: Window = None,
    softcap: float = 0.0, bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    allow_short_kv: bool = False, batch_invariant: bool = False, precise: bool = False,
    num_threads: int | None = None,
    out: TensorT | None = None, lse: TensorT | None = None, return_lse: Literal[False] = False,
) -> TensorT: ...
@overload
def paged_attention(
    q: TensorT, k_cache: Tensor, v_cache: Tensor, *,
    q_lens: Indices, kv_lens: Indices | None = None, first_positions: Indices | None = None,
    block_tables: IndexTable | None = None,
    kv_indptr: Indices | None = None, kv_indices: Indices | None = None,
    last_page_len: Indices | None = None, page_size: int | None = None, kv_layout: str = "NHD",
    k_scale: KVScale = None, v_scale: KVScale = None, kv_dtype: str | None = None,
    scale: float | None = None, causal: Flags = True, window: Window = None,
    softcap: float = 0.0, bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    allow_short_kv: bool = False, batch_invariant: bool = False, precise: bool = False,
    num_threads: int | None = None,
    out: TensorT | None = None, lse: TensorT | None = None, return_lse: Literal[True],
) -> tuple[TensorT, TensorT]: ...
@overload
def paged_attention(
    q: TensorT, k_cache: Tensor, v_cache: Tensor, *,
    q_lens: Indices, kv_lens: Indices | None = None, first_positions: Indices | None = None,
    block_tables: IndexTable | None = None,
    kv_indptr: Indices | None = None, kv_indices: Indices | None = None,
    last_page_len: Indices | None = None, page_size: int | None = None, kv_layout: str = "NHD",
    k_scale: KVScale = None, v_scale: KVScale = None, kv_dtype: str | None = None,
    scale: float | None = None, causal: Flags = True, window: Window = None,
    softcap: float = 0.0, bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    allow_short_kv: bool = False, batch_invariant: bool = False, precise: bool = False,
    num_threads: int | None = None,
    out: TensorT | None = None, lse: TensorT | None = None, return_lse: bool,
) -> TensorT | tuple[TensorT, TensorT]: ...
# fmt: on
def paged_attention(
    q: TensorT,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_lens: Indices,
    kv_lens: Indices | None = None,
    first_positions: Indices | None = None,
    block_tables: IndexTable | None = None,
    kv_indptr: Indices | None = None,
    kv_indices: Indices | None = None,
    last_page_len: Indices | None = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    k_scale: KVScale = None,
    v_scale: KVScale = None,
    kv_dtype: str | None = None,
    scale: float | None = None,
    causal: Flags = True,
    window: Window = None,
    softcap: float = 0.0,
    bias: ScoreBias = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    allow_short_kv: bool = False,
    batch_invariant: bool = False,
    precise: bool = False,
    num_threads: int | None = None,
    out: TensorT | None = None,
    lse: TensorT | None = None,
    return_lse: bool = False,
) -> TensorT | tuple[TensorT, TensorT]:
    """Compute attention of ragged queries over keys and values in pages.

    For query ``i`` of sequence ``s``, at position ``p = first_positions[s] + i``::

        visible = [j for j in range(kv_lens[s]) if (not causal[s] or j <= p)
                   and p - left <= j <= p + right and mask(i, j)]      # window: left, right
        score = softcap * tanh(scale * q @ k[j] / softcap)      # softcap 0: scale * q @ k[j]
        score += bias[s, h, i, j] - alibi_slopes[h] * abs(j - p) + relative_bias[h, m + j - p]
        out = sum(exp(score[j]) * v[j]) / (sum(exp(score[j])) + exp(sinks[h]))
        lse = log(sum(exp(score[j])))

    Query head ``h`` reads KV head ``h // (num_heads // num_kv_heads)``.

    **Visibility.** `causal`, `window`, the mask and a bias of -inf each hide keys; a key is visible
    if none hides it. A hidden key never matters, NaN included. A visible key counts even with
    weight 0, so an infinite value then gives NaN. A row without visible keys gives zeros and LSE
    -inf.

    **Scales.** The kernel multiplies a number of the cache, or the number that an 8-bit code stands
    for, by `k_scale` or `v_scale`: one positive number, one per KV head, or, for codes, one per
    token and head, in the pages of the cache.

    **Layouts.** A cache is [num_pages, page_size, num_kv_heads, dim] ("NHD"), [num_pages,
    num_kv_heads, page_size, dim] ("HND") or, with `page_size`, [num_slots, num_kv_heads, dim]. Page
    ids come as a rectangle (`block_tables` and `kv_lens`) or in CSR form: sequence s has the pages
    ``kv_indices[kv_indptr[s]:kv_indptr[s + 1]]`` with ``last_page_len[s]`` tokens in the last one.

    **Results.** Sums are in float32, and the result is rounded once. For bfloat16, the instruction
    sets avx512bf16, amx and neonbf16 also round each weight ``exp(score[j] - maximum)`` to
    bfloat16. They do not with `precise`, or for sequences with few rows: new tokens that make, over
    all heads of a KV head, up to 4 rows.

    Parameters
    ----------
    q : tensor [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
        New tokens, sequence after sequence. head_dim is at most 576.
    k_cache, v_cache : tensors of the dtype of q, or both of codes, in one of the three layouts
        Any strides with a contiguous last dimension; never copied. `v_cache` may have another dim.
        Codes of 8 bits are float8_e4m3fn, float8_e5m2, int8, or uint8 with `kv_dtype`.
    q_lens : ints [batch]
        New tokens per sequence; zero is allowed.
    kv_lens : ints [batch]
        Cached tokens per sequence including the new ones: with `causal` at least `q_lens`, unless
        `first_positions` or `allow_short_kv` is given.
    first_positions : ints [batch], default kv_lens - q_lens
        Position of each sequence's first query among its keys. The default aligns the last query
        with the last key (bottom right, as in flash-attn); zeros align top left, as torch's
        ``is_causal`` does. A query may stand before the first key or behind the last.
    block_tables : ints [batch, >= ceil(max(kv_lens) / page_size)]
        Page ids; entries beyond a sequence's own pages are never read.
    kv_indptr, kv_indices, last_page_len : ints [batch + 1], [pages of all], [batch]
        The CSR form, instead of `kv_lens` and `block_tables`.
    page_size : int, optional
        Tokens per page. A 3-D cache requires it; a 4-D cache has it in its shape.
    kv_layout : {"NHD", "HND"}
        Order of the axes of 4-D caches; it is never guessed.
    k_scale, v_scale : float or tensor, default 1
        Factors of keys and values; int8 requires both. A positive number or a tensor of one;
        float32 [num_kv_heads]; or, for codes, float32, float16 or bfloat16 in the shape of the
        cache without its last dimension.
    kv_dtype : {"float8_e4m3fn", "float8_e5m2", "int8"}, optional
        Type of the codes in a uint8 cache.
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores; required for head_dim > 256.
    causal : bool or bools [batch]
        Whether a token sees only keys up to its own position. False: all keys of its sequence.
    window : int or (int or None, int or None), optional
        Number of visible keys before and behind a token's own, which does not count; None for all
        keys of that side. `causal` hides the keys behind. A single number is the left side, if
        `causal` is true for all sequences. Key blocks that no token of a tile sees are not read.
    softcap : float
        0 for none, else from 1e-37 to 1e37.
    bias : tensor or list of one tensor [num_heads, q_len, kv_len] for each sequence, optional
        Added to scores after scale and softcap; float32, float16 or bfloat16, any strides. One
        tensor is [batch, num_heads, max(q_lens), max(kv_lens)], or longer in the last two axes. An
        axis of length 1 is broadcast. -inf hides a key, and NaN shows in the row. Any bias turns
        off matrix tiles (amx).
    alibi_slopes : tensor [num_heads] or [batch, num_heads], float32, optional
        Adds ``-slope * abs(j - p)``; finite.
    relative_bias : tensor [num_heads, 2 * m + 1], float32, optional
        Adds element ``m + min(max(j - p, -m), m)``, as T5 does with its buckets.
    sinks : tensor [num_heads], float32, optional
        One logit per head that takes weight but has no value.
    custom_mask : tensor [sum(q_lens * kv_lens)], bool, optional
        True = visible, row-major per sequence. With ``causal=False``, the mask alone decides.
    packed_custom_mask : tensor [sum(ceil(q_lens * kv_lens / 8))], uint8, optional
        The mask as bits, instead of `custom_mask`: bit ``i % 8`` (from the least significant) of
        byte ``i // 8`` is element ``i`` of a sequence's mask, and every sequence begins at a new
        byte. Make it per sequence by ``np.packbits(mask, bitorder="little")``; FlashInfer has the
        same form.
    allow_short_kv : bool
        Whether, with `causal`, a sequence may have more queries than keys: its last query meets the
        last key, and queries before key 0 see none. By default an error, as `kv_lens` without the
        new tokens is the usual cause.
    batch_invariant : bool
        Whether a row's result is bitwise independent of the rest of the batch, of chunking and of
        the context-parallel split. If False, the kernel splits sequences of up to 16 new tokens
        along their keys, and reads sequences with few rows at memory speed. Only the lengths of the
        batch decide the split, so results never depend on the number of threads.
    precise : bool
        Whether to round bfloat16 only in the result, on every instruction set. Sequences with few
        rows always do so, unless `batch_invariant` is set. Instruction sets that round no weights
        give the same bits in any case.
    num_threads : int, optional
        Default: `set_num_threads`, ``CPATTN_NUM_THREADS``, or all CPUs. 1 uses only the caller's
        thread. The result does not depend on it. `cpattn.num_threads` sets it for all functions.
    out, lse : tensors, optional
        Receive the results and are returned; must not overlap an input.
    return_lse : bool
        Whether to return `lse`, too.

    Returns
    -------
    out : tensor [num_tokens, num_heads, v_head_dim], container and dtype of q
    lse : tensor [num_tokens, num_heads], float32; only with ``return_lse``
        Natural log-sum-exp without sinks.

    Raises
    ------
    TypeError
        If an argument is no tensor or has another dtype, or indices are floats or bools.
    ValueError
        If lengths, shapes, page ids or tables do not fit; nothing is written then.

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
    rows, num_heads, _ = _core.shape_of(q, function, "q", 3)
    v_head_dim = (0, *_core.shape_of(v_cache, function, "v_cache"))[-1]
    out, lse = _outputs(function, q, rows, num_heads, v_head_dim, out, lse, return_lse)
    _core.paged_attention(
        q, k_cache, v_cache, q_lens, kv_lens, first_positions, block_tables, kv_indptr, kv_indices,
        last_page_len, page_size, kv_layout, k_scale, v_scale, kv_dtype, scale, causal, window,
        softcap, (bias, alibi_slopes, relative_bias), sinks, custom_mask, packed_custom_mask,
        allow_short_kv, batch_invariant, precise, num_threads, out, lse,
    )  # fmt: skip
    return out if lse is None or not return_lse else (out, lse)


@announced("plan_attention")
def plan_attention(
    *,
    q_lens: Indices,
    kv_lens: Indices,
    first_positions: Indices | None = None,
    block_tables: IndexTable,
    page_size: int,
    num_pages: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    causal: Flags = True,
    window: Window = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    allow_short_kv: bool = False,
    batch_invariant: bool = False,
    precise: bool = False,
    num_threads: int | None = None,
) -> AttentionPlan:
    """Divide a batch into work items, once for all layers.

    The call checks everything but the tensors, page ids included, so that `run_attention` only
    compares shapes.

    Parameters
    ----------
    q_lens, kv_lens : ints [batch]
        New tokens of each sequence, and its cached tokens including the new ones.
    block_tables : ints [batch, >= ceil(max(kv_lens) / page_size)]
        Page ids, from 0 to num_pages - 1; entries beyond a sequence's own pages are never read.
    page_size, num_pages : int
        Tokens per page, and number of pages in the caches of the runs.
    num_heads, num_kv_heads : int
        Query heads, a multiple of the KV heads.
    head_dim, v_head_dim : int
        Elements of a key and a value, up to 576. Default of v_head_dim: head_dim.
    first_positions, causal, window, custom_mask, packed_custom_mask, allow_short_kv
        Visibility of keys, as in `paged_attention`.
    batch_invariant, precise, num_threads
        Division of work, rounding of bfloat16, and threads for runs of this plan, as in
        `paged_attention`; the division of work does not depend on the threads.

    Returns
    -------
    AttentionPlan
        A value: comparable, printable, with read-only array views.

    Raises
    ------
    TypeError
        If lengths, tables or sizes are no integers, or a mask is no tensor of bools.
    ValueError
        If lengths, tables, page ids or head sizes do not fit; names argument, rule and position.

    Examples
    --------
    >>> import cpattn
    >>> plan = cpattn.plan_attention(
    ...     q_lens=[3, 1], kv_lens=[10, 4], block_tables=[[2, 0], [1, -1]], page_size=8,
    ...     num_pages=4, num_heads=2, num_kv_heads=1, head_dim=16)
    >>> plan.page_ids, plan.page_indptr     # the entry -1 is beyond the second sequence
    (array([2, 0, 1], dtype=int32), array([0, 2, 3]))
    """
    return _core.plan_attention(
        q_lens, kv_lens, first_positions, block_tables, page_size, num_pages, num_heads,
        num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, causal, window,
        custom_mask, packed_custom_mask, allow_short_kv, batch_invariant, precise, num_threads,
    )  # fmt: skip


# fmt: off
@overload
def run_attention(
    plan: AttentionPlan, q: TensorT, k_cache: Tensor, v_cache: Tensor, *,
    kv_layout: str = "NHD", k_scale: KVScale = None, v_scale: KVScale = None,
    kv_dtype: str | None = None, scale: float | None = None, softcap: float = 0.0,
    bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    out: TensorT | None = None, lse: TensorT | None = None,
    return_lse: Literal[False] = False,
) -> TensorT: ...
@overload
def run_attention(
    plan: AttentionPlan, q: TensorT, k_cache: Tensor, v_cache: Tensor, *,
    kv_layout: str = "NHD", k_scale: KVScale = None, v_scale: KVScale = None,
    kv_dtype: str | None = None, scale: float | None = None, softcap: float = 0.0,
    bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    out: TensorT | None = None, lse: TensorT | None = None,
    return_lse: Literal[True],
) -> tuple[TensorT, TensorT]: ...
@overload
def run_attention(
    plan: AttentionPlan, q: TensorT, k_cache: Tensor, v_cache: Tensor, *,
    kv_layout: str = "NHD", k_scale: KVScale = None, v_scale: KVScale = None,
    kv_dtype: str | None = None, scale: float | None = None, softcap: float = 0.0,
    bias: ScoreBias = None, alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None, sinks: Tensor | None = None,
    out: TensorT | None = None, lse: TensorT | None = None,
    return_lse: bool,
) -> TensorT | tuple[TensorT, TensorT]: ...
# fmt: on
@announced("run_attention")
def run_attention(
    plan: AttentionPlan,
    q: TensorT,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: KVScale = None,
    v_scale: KVScale = None,
    kv_dtype: str | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: ScoreBias = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    out: TensorT | None = None,
    lse: TensorT | None = None,
    return_lse: bool = False,
) -> TensorT | tuple[TensorT, TensorT]:
    """Run a plan on one layer's tensors.

    Parameters
    ----------
    plan : AttentionPlan
        Result of `plan_attention`; a plan may run on several threads at once.
    q : tensor [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
        New tokens, as many as in the plan's `q_lens`.
    k_cache, v_cache : tensors of the dtype of q, or both of codes, in one of three shapes
        [num_pages, page_size, num_kv_heads, dim] ("NHD"), [num_pages, num_kv_heads, page_size,
        dim] ("HND"), or [num_pages * page_size, num_kv_heads, dim]; never copied.
    kv_layout : {"NHD", "HND"}
        Order of the axes of 4-D caches.
    k_scale, v_scale, kv_dtype
        Scales and dtype of codes, as in `paged_attention`.
    scale : float, default 1/sqrt(head_dim)
        Factor of the scores; required for head_dim > 256.
    softcap, bias, alibi_slopes, relative_bias, sinks
        See `paged_attention`.
    out, lse : tensors, optional
        Receive the results and are returned; must not overlap an input.
    return_lse : bool
        Whether to return `lse`, too.

    Returns
    -------
    out : tensor [num_tokens, num_heads, v_head_dim], container and dtype of q
    lse : tensor [num_tokens, num_heads], float32; only with ``return_lse``
        Natural log-sum-exp without sinks.

    Raises
    ------
    TypeError
        If `plan` is no plan, an argument is no tensor, or dtypes do not fit.
    ValueError
        If shapes differ from the plan's; nothing is written then.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> batch = dict(q_lens=[3], kv_lens=[10], block_tables=[[2, 0]])
    >>> plan = cpattn.plan_attention(**batch, page_size=8, num_pages=4, num_heads=2,
    ...                              num_kv_heads=1, head_dim=16)
    >>> random = np.random.default_rng(0)
    >>> q, cache = random.random((3, 2, 16)), random.random((4, 8, 1, 16))
    >>> q, cache = q.astype(np.float32), cache.astype(np.float32)
    >>> out = cpattn.run_attention(plan, q, cache, cache)
    >>> bool((out == cpattn.paged_attention(q, cache, cache, **batch)).all())
    True
    """
    function = "run_attention"
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"{function}: plan must be an AttentionPlan, got {type(plan).__name__}")
    rows, num_heads, _ = _core.shape_of(q, function, "q", 3)
    out, lse = _outputs(function, q, rows, num_heads, plan.v_head_dim, out, lse, return_lse)
    _core.run_attention(
        plan, q, k_cache, v_cache, kv_layout, k_scale, v_scale, kv_dtype, scale, softcap,
        (bias, alibi_slopes, relative_bias), sinks, out, lse,
    )  # fmt: skip
    return out if lse is None or not return_lse else (out, lse)
