# SPDX-License-Identifier: Apache-2.0
"""Continuous batching of transformers on the pages of its cache, in place.

transformers 5.24 no longer hands the cache to attention functions: it writes to it and reads it
itself, and hands over the keys of all sequences, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._types import AnyTensor
from ...attention import default_scale, plan_attention, run_attention
from .._ragged import RaggedPages
from .contiguous import UNSUPPORTED, check_supported, float_sinks
from .masks import FUNCTION, window_of


@dataclass(frozen=True)
class _Kind:
    """Plan that all layers with one kind of attention, full or sliding, share for a batch."""

    plan: Any
    in_place: bool


class _Batch:
    """The sequences of one forward pass, and what is derived from them once for all layers."""

    def __init__(self, cu_seq_lens_q: AnyTensor) -> None:
        ends = np.asarray(cu_seq_lens_q, np.int64)
        self.q_lens = np.diff(ends)
        self.rows = int(ends[-1])  # the others, if there are any, are padding
        self._kinds: dict[int, _Kind] = {}
        self._read: dict[int | None, tuple[Any, RaggedPages]] = {}

    def read(
        self,
        key: AnyTensor,
        value: AnyTensor,
        num_heads: int,
        cu_seq_lens_k: AnyTensor,
        window: int | None,
    ) -> tuple[Any, RaggedPages]:
        """Plan over keys [keys, num_kv_heads, dim] that transformers has read, and their pages."""
        if window not in self._read:
            ends = np.asarray(cu_seq_lens_k, np.int64)
            kv_lens = np.diff(ends)
            pages = RaggedPages(ends[:-1], kv_lens, len(key))
            plan = plan_attention(
                q_lens=self.q_lens, kv_lens=kv_lens, block_tables=pages.block_tables,
                page_size=pages.page_size, num_pages=pages.num_pages, num_heads=num_heads,
                num_kv_heads=key.shape[1], head_dim=key.shape[2], v_head_dim=value.shape[2],
                window=None if window is None else window - 1,
            )  # fmt: skip
            self._read[window] = plan, pages
        return self._read[window]

    def kind(
        self,
        allocator: Any,
        num_heads: int,
        cu_seq_lens_k: AnyTensor,
        reads: AnyTensor,
        writes: AnyTensor,
    ) -> _Kind:
        if allocator.index not in self._kinds:
            self._kinds[allocator.index] = self._plan(
                allocator, num_heads, np.asarray(cu_seq_lens_k, np.int64), reads, writes
            )
        return self._kinds[allocator.index]

    def _plan(
        self, allocator: Any, num_heads: int, ends: Any, reads: AnyTensor, writes: AnyTensor
    ) -> _Kind:
        """Return the pages of each sequence, and the division of work over them.

        A sequence of n cached and m new tokens has n + m of `reads`, the cache rows in the order of
        positions. With full attention, these fill pages from their start. A sliding window is a
        ring of rows in any order, so a page is one row there. New tokens, which may reuse rows of
        others, have sentinels instead.
        """
        kv_lens = np.diff(ends)
        window: Any = getattr(allocator, "sliding_window", None)
        in_place = window is None or int(kv_lens.max()) <= window
        page_size = allocator.tokens_per_page if in_place and window is None else 1
        most = -(-int(kv_lens.max()) // page_size)
        table = ends[:-1, None] + page_size * np.arange(most)
        num_pages = int(ends[-1])
        if in_place:
            # Without cached tokens there are no reads: each sequence reads its writes.
            rows = (reads if len(reads) else writes).numpy().copy()
            np.place(rows, rows == allocator.sentinel_index, np.asarray(writes))
            table = rows[np.minimum(table, len(rows) - 1)] // page_size
            num_pages = int(table.max()) + 1
        plan = plan_attention(
            q_lens=self.q_lens, kv_lens=kv_lens, block_tables=table, page_size=page_size,
            num_pages=num_pages, num_heads=num_heads, num_kv_heads=allocator.num_key_value_heads,
            head_dim=allocator.head_dim, window=None if in_place or window is None else window - 1,
        )  # fmt: skip
        return _Kind(plan, in_place)


def _batch_of(cu_seq_lens_q: AnyTensor) -> _Batch:
    """Return the batch, kept on a tensor that all layers of one forward pass share."""
    if not hasattr(cu_seq_lens_q, "cpattn_batch"):
        cu_seq_lens_q.cpattn_batch = _Batch(cu_seq_lens_q)
    batch: _Batch = cu_seq_lens_q.cpattn_batch
    return batch


def paged_attention_forward(
    module: Any,
    query: AnyTensor,
    key: AnyTensor,
    value: AnyTensor,
    attention_mask: AnyTensor | None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Any = None,
    cu_seq_lens_k: Any = None,
    read_index: Any = None,
    write_index: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: AnyTensor | None = None,
    **options: Any,
) -> tuple[AnyTensor, None]:
    """Attention function of transformers for the batches of ``generate_batch``.

    It writes the new keys and values into the pages of the cache and attends to them there. Only a
    chunk that pushes tokens out of a sliding window attends to a copy, of window and chunk.

    Parameters
    ----------
    query : float32, float16 or bfloat16 tensor, shape [1, num_heads, tokens, head_dim]
        New tokens of all sequences, followed by padding, whose results are zeros.
    key, value : tensors, shape [1, num_kv_heads, tokens, head_dim]
        Or, from transformers 5.24 on, all keys of the sequences, one after another.
    cache : PagedAttentionCache, optional
        None from transformers 5.24 on.
    cu_seq_lens_q : int32 tensor, shape [sequences + 1]
    cu_seq_lens_k : dict of int32 tensors, or one, shape [sequences + 1]
        Starts of the sequences' keys, for each kind of layers, or for this layer.
    read_index, write_index : lists of int64 tensors
        Rows of the cache for each kind of layers: of all tokens, and of the new ones.
    scaling, softcap, s_aux, dropout, **options
        See `contiguous_attention`.

    Returns
    -------
    out : tensor, shape [1, tokens, num_heads, head_dim]
    None
        In place of attention weights.
    """
    if cache is None and cu_seq_lens_k is None:
        raise ValueError(
            f"{FUNCTION}: cache must be that of generate_batch, got None; the name without _flash "
            "is for everything else"
        )
    check_supported(
        query, key, value,
        dropout=dropout,
        options=options,
        unsupported=(*UNSUPPORTED, "block_table", "indices"),
    )  # fmt: skip
    if attention_mask is not None:  # no mask function of this name makes one
        raise ValueError(
            f"{FUNCTION}: attention_mask must be None in continuous batching, where lengths say "
            "what is visible: a mask or bias that a layer makes is not supported"
        )
    batch = _batch_of(cu_seq_lens_q)
    rows = [x[0].transpose(0, 1) for x in (key, value)]
    if cache is None:
        window = window_of(module, options.get("sliding_window"))
        plan, ragged = batch.read(rows[0], rows[1], query.shape[1], cu_seq_lens_k, window)
        k_pages, v_pages = map(ragged.of, rows)
    else:
        allocator = cache.layer_to_allocator[module.layer_idx]
        reads, writes = read_index[allocator.index], write_index[allocator.index]
        lengths = cu_seq_lens_k[allocator.layer_type]
        kind = batch.kind(allocator, query.shape[1], lengths, reads, writes)
        if kind.in_place:
            caches = allocator._kv_page_views[module.layer_idx]
            for pages, states in zip(caches, rows, strict=True):
                pages.flatten(0, 1).index_copy_(0, writes, states)
        else:
            caches = allocator.update(*rows, module.layer_idx, reads, writes)
        plan = kind.plan
        k_pages, v_pages = (x.view(-1, plan.page_size, *x.shape[-2:]) for x in caches)
    q = query[0].transpose(0, 1)
    out = q.new_zeros(q.shape) if batch.rows < len(q) else q.new_empty(q.shape)
    run_attention(
        plan, q[: batch.rows], k_pages, v_pages,
        scale=default_scale(FUNCTION, query.shape[-1]) if scaling is None else scaling,
        softcap=softcap or 0.0, sinks=float_sinks(s_aux), out=out[: batch.rows],
    )  # fmt: skip
    return out[None], None
