# SPDX-License-Identifier: Apache-2.0
"""The forward functions of flash-attn 2.8 on CPU tensors.

Arguments, their order, masks aligned to the bottom right corner, and the layouts of the log-sum-exp
are those of the package: natural logarithm, float32, [heads, tokens] for ragged batches and
[batch, heads, tokens] for the others, and +inf for a row that sees no key, whose output is zero.
Keys and values are never copied. There is no backward pass, dropout, ALiBi or rotary embedding:
what is not supported is refused with a ValueError that names it.

`install` puts these functions where ``import flash_attn`` finds them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from .._containers import Tensor, empty, torch_of
from .._stand_in import StandIn
from .._visibility import Lengths, visibility
from ..attention import default_scale, paged_attention

WindowSize = tuple[int, int]


def _check_supported(
    function: str, q: Tensor, *others: Tensor, dropout_p: float = 0.0, **unsupported: Any
) -> None:
    torch = torch_of(q)
    if torch is None:
        raise TypeError(f"{function}: q must be a torch tensor, got {type(q).__name__}")
    if dropout_p != 0:
        raise ValueError(f"{function}: dropout_p must be 0, there is no dropout, got {dropout_p}")
    for name, value in unsupported.items():
        if value is not None:
            raise ValueError(f"{function}: {name} is not supported, it must be None")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others) if x is not None):
        raise ValueError(
            f"{function}: inputs must not require gradients, there is no backward pass; call it "
            "under torch.no_grad() or detach() them"
        )


def _ends(function: str, name: str, cu_seqlens: Tensor, num_rows: int | None) -> Lengths:
    """Cumulative lengths as NumPy, checked against the rows that they divide."""
    ends = np.asarray(cu_seqlens, np.int64)
    if ends.ndim != 1 or len(ends) == 0 or ends[0] != 0 or np.any(np.diff(ends) < 0):
        raise ValueError(f"{function}: {name} must start at 0 and not decrease, got {ends}")
    if num_rows is not None and ends[-1] > num_rows:
        raise ValueError(
            f"{function}: {name} must end within the {num_rows} rows it divides, got {ends[-1]}"
        )
    return ends


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _as_pages(k: Tensor, v: Tensor, ends: Lengths, kv_lens: Lengths) -> tuple[Tensor, Tensor, Any]:
    """Ragged keys and values as pages, without a copy, and the pages of each sequence.

    A page starts at every token and overlaps those after it, so a sequence has pages wherever it
    starts. Their length is the room after the last start: the longest with which the last page of
    every sequence ends within the tensor. In most batches each sequence is one or a few pages.
    """
    starts = ends[:-1]
    used = starts[kv_lens > 0]
    page_size = int(len(k) - used[-1]) if len(used) else 1
    if page_size == 1:  # also when there is no token at all, which unfold() refuses
        k_pages, v_pages = k.unsqueeze(1), v.unsqueeze(1)
    else:
        k_pages, v_pages = (x.unfold(0, page_size, 1).movedim(-1, 1) for x in (k, v))
    most = -(-int(kv_lens.max(initial=0)) // page_size)
    return k_pages, v_pages, starts[:, None] + page_size * np.arange(most)


def _attend(
    function: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    q_lens: Lengths,
    kv_lens: Lengths,
    block_table: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over pages: out [tokens, heads, dim] and LSE [heads, tokens]."""
    lse = empty(q, (q.shape[1], q.shape[0]), "float32")
    left, right = window_size
    out = paged_attention(
        q,
        k_pages,
        v_pages,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_tables=block_table,
        scale=default_scale(function, q.shape[2]) if softmax_scale is None else softmax_scale,
        softcap=softcap,
        batch_invariant=batch_invariant,
        lse=lse.T,
        **visibility(q_lens, kv_lens, left, 0 if causal else right),
    )
    return out, lse.masked_fill_(lse == -np.inf, np.inf)


def _attend_batch(
    function: str,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    kv_lens: Lengths,
    block_table: Any,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The same for queries of equal lengths: out [batch, tokens, heads, dim], LSE [batch, heads,
    tokens]."""
    batch, tokens, heads = q.shape[:3]
    q_lens = np.full(batch, tokens)
    rows = _rows_contiguous(q).flatten(0, 1)
    out, lse = _attend(function, rows, k_pages, v_pages, q_lens, kv_lens, block_table, *options)
    lse = lse.view(heads, batch, tokens).transpose(0, 1).contiguous()
    return out.view(batch, tokens, heads, out.shape[-1]), lse


def _forward(
    function: str, q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    if q.ndim != 4 or k.ndim != 4 or len(q) != len(k):
        raise ValueError(
            f"{function}: q and k must be [batch, tokens, heads, dim] of one batch, got shapes "
            f"{list(q.shape)} and {list(k.shape)}"
        )
    batch, kv_len = k.shape[:2]
    k, v = _rows_contiguous(k), _rows_contiguous(v)
    if kv_len == 0:  # a page cannot be empty; no page is read
        k, v = (x.new_empty((0, 1, *x.shape[2:])) for x in (k, v))
    table = np.arange(batch)[:, None]
    return _attend_batch(function, q, k, v, np.full(batch, kv_len), table, *options)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of sequences of equal lengths.

    Parameters
    ----------
    q : float32, float16 or bfloat16 tensor, shape [batch, tokens, heads, head_dim]
    k, v : tensors of the same dtype, shape [batch, kv_tokens, kv_heads, head_dim]
        A page each, in place.
    softmax_scale : float, default 1/sqrt(head_dim)
    causal : bool
        Aligned to the bottom right: query i sees keys up to i + kv_tokens - tokens.
    window_size : pair of int
        Keys before and after that one; -1 is no bound. A window that ends elsewhere than at the
        query's own key takes a mask of one byte per query and key.
    softcap : float
        Above 0, scores become softcap * tanh(score / softcap).
    dropout_p, alibi_slopes
        Must be 0 and None.
    deterministic
        About a backward pass; has no meaning here.
    return_attn_probs : bool
        Also return the LSE, and an empty tensor in place of the probabilities.

    Returns
    -------
    out : tensor, shape [batch, tokens, heads, head_dim]
    softmax_lse : float32 tensor, shape [batch, heads, tokens], with ``return_attn_probs``
    """
    name = "flash_attn_func"
    _check_supported(name, q, k, v, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    out, lse = _forward(name, q, k, v, softmax_scale, causal, window_size, softcap)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """`flash_attn_func` as libraries call it: out, LSE, no probabilities, no state of a generator.

    ``return_softmax`` asks for probabilities after dropout, which there is none of.
    """
    name = "_flash_attn_forward"
    _check_supported(name, q, k, v, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    window = (window_size_left, window_size_right)
    out, lse = _forward(name, q, k, v, softmax_scale, causal, window, softcap)
    return out, lse, q.new_empty(0), None


def _varlen_forward(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    ends_q = _ends(function, "cu_seqlens_q", cu_seqlens_q, len(q))
    num_rows = None if block_table is not None else len(k)
    ends_k = _ends(function, "cu_seqlens_k", cu_seqlens_k, num_rows)
    if len(ends_q) != len(ends_k):
        raise ValueError(
            f"{function}: cu_seqlens_q and cu_seqlens_k must have one length, got {len(ends_q)} "
            f"and {len(ends_k)}"
        )
    kv_lens = np.diff(ends_k)
    if seqused_k is not None:
        used = np.asarray(seqused_k, np.int64)
        if used.shape != kv_lens.shape or np.any(used > kv_lens):
            raise ValueError(
                f"{function}: seqused_k must be at most the lengths {kv_lens}, got {used}"
            )
        kv_lens = used
    table: Any = block_table
    k, v = _rows_contiguous(k), _rows_contiguous(v)
    if table is None:
        k, v, table = _as_pages(k, v, ends_k, kv_lens)
    q = _rows_contiguous(q)
    return _attend(function, q, k, v, np.diff(ends_q), kv_lens, table, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention of ragged sequences; what is not said here is as in `flash_attn_func`.

    Parameters
    ----------
    q : tensor, shape [total_q, heads, head_dim]
        Sequence after sequence.
    k, v : tensors, shape [total_k, kv_heads, head_dim]
        With ``block_table``: [num_pages, page_size, kv_heads, head_dim], any page size.
    cu_seqlens_q, cu_seqlens_k : int tensors, shape [batch + 1]
        Where sequences start and end; they may be empty.
    max_seqlen_q, max_seqlen_k
        Not needed.
    block_table : int tensor, shape [batch, pages], optional

    Returns
    -------
    out : tensor, shape [total_q, heads, head_dim]
    softmax_lse : float32 tensor, shape [heads, total_q], with ``return_attn_probs``
    """
    name = "flash_attn_varlen_func"
    _check_supported(name, q, k, v, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    out, lse = _varlen_forward(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, None,
        softmax_scale, causal, window_size, softcap,
    )  # fmt: skip
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """`flash_attn_varlen_func` as libraries call it; see `_flash_attn_forward`.

    ``seqused_k`` [batch]: how many of its keys each sequence has. ``zero_tensors`` has no meaning.
    """
    name = "_flash_attn_varlen_forward"
    _check_supported(
        name, q, k, v, dropout_p=dropout_p, alibi_slopes=alibi_slopes, leftpad_k=leftpad_k
    )
    out, lse = _varlen_forward(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k,
        softmax_scale, causal, (window_size_left, window_size_right), softcap,
    )  # fmt: skip
    return out, lse, q.new_empty(0), None


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, table: Any, lengths: Lengths
) -> None:
    """Write new tokens behind those in the pages."""
    import torch

    name = "flash_attn_with_kvcache"
    for argument, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = [len(table), k.shape[1], *cache.shape[2:]]
        if list(new.shape) != expected:
            raise ValueError(
                f"{name}: {argument} must have shape {expected}, got {list(new.shape)}"
            )
    page_size = k_cache.shape[1]
    position = lengths[:, None] + np.arange(k.shape[1])
    last = int(position.max(initial=-1)) // page_size
    if last >= table.shape[1]:
        raise ValueError(
            f"{name}: k needs room for {int(position.max()) + 1} tokens, the "
            f"cache of a sequence has {table.shape[1] * page_size}"
        )
    pages = np.take_along_axis(table, position // page_size, 1)
    if np.any(pages < 0) or np.any(pages >= len(k_cache)):
        raise ValueError(
            f"{name}: pages of new tokens must be in [0, {len(k_cache)}), got "
            f"{pages.min()} to {pages.max()}"
        )
    at = torch.from_numpy(pages), torch.from_numpy(position % page_size)
    k_cache[at], v_cache[at] = k, v


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a cache, after appending new keys and values to it in place.

    Parameters
    ----------
    q : tensor, shape [batch, tokens, heads, head_dim]
    k_cache, v_cache : tensors, shape [cache_batch, capacity, kv_heads, head_dim]
        With ``block_table``: [num_pages, page_size, kv_heads, head_dim], any page size.
    k, v : tensors, shape [batch, new_tokens, kv_heads, head_dim], optional
    cache_seqlens : int or int tensor, shape [batch]
        Tokens in the cache without the new ones; default: all that it has room for.
    cache_batch_idx : int tensor, shape [batch], optional
        The row of the cache that each sequence has; not together with ``block_table``.
    rotary_cos, rotary_sin, cache_leftpad, alibi_slopes
        Must be None; ``rotary_interleaved`` has no meaning without the first two.
    num_splits : int
        1 keeps the keys of a row together, bitwise the same in any batch; else as is fastest.

    Returns
    -------
    out : tensor, shape [batch, tokens, heads, head_dim]
    softmax_lse : float32 tensor, shape [batch, heads, tokens], with ``return_softmax_lse``
    """
    name = "flash_attn_with_kvcache"
    _check_supported(
        name, q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError(f"{name}: cache_seqlens must be given with k")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError(f"{name}: cache_batch_idx must not be given with block_table")
    batch = len(q)
    rows = np.arange(batch) if cache_batch_idx is None else np.asarray(cache_batch_idx, np.int64)
    table = rows[:, None] if block_table is None else np.asarray(block_table)
    if cache_seqlens is None:
        cache_seqlens = table.shape[1] * k_cache.shape[1]
    lengths = np.asarray(cache_seqlens, np.int64)
    if lengths.shape not in ((), (batch,)) or np.any(lengths < 0) or len(table) != batch:
        raise ValueError(
            f"{name}: cache_seqlens and the rows of the cache must be {batch} numbers >= 0, got "
            f"{lengths} and {len(table)} rows"
        )
    lengths = np.broadcast_to(lengths, (batch,))
    if k is not None:
        _append(k_cache, v_cache, k, v, table, lengths)
        lengths = lengths + k.shape[1]
    out, lse = _attend_batch(
        name, q, k_cache, v_cache, lengths, table,
        softmax_scale, causal, window_size, softcap, num_splits == 1,
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _flash_attn_backward(*_: Any, **__: Any) -> NoReturn:
    """Only for libraries that import the name."""
    raise NotImplementedError("_flash_attn_backward: cpattn has no backward pass")


_flash_attn_varlen_backward = _flash_attn_backward


def install() -> StandIn:
    """Put these functions into modules ``flash_attn`` and ``flash_attn.flash_attn_interface``.

    Returns
    -------
    StandIn
        A context manager; its ``remove()`` or the end of a ``with`` takes the modules away.

    Raises
    ------
    ImportError
        If a package of that name can be imported.

    Examples
    --------
    >>> from cpattn.integrations import flash_attn
    >>> with flash_attn.install():
    ...     from flash_attn import flash_attn_varlen_func
    """
    names: dict[str, Any] = {
        function.__name__: function
        for function in (
            flash_attn_func,
            flash_attn_varlen_func,
            flash_attn_with_kvcache,
            _flash_attn_forward,
            _flash_attn_varlen_forward,
            _flash_attn_backward,
        )
    }
    names["_flash_attn_varlen_backward"] = _flash_attn_varlen_backward
    names["__version__"] = "2.8.3"
    return StandIn("flash_attn", ["flash_attn_interface"], names)
