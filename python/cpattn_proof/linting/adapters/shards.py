# SPDX-License-Identifier: Apache-2.0
"""Sharded KV pools: cpattn's sharded plans, and striped pools such as sglang's.

Documents have one cache of logical slots, as in block tables: the placement maps a row of a rank's
own pool to its logical slot. It therefore decides which rank keeps a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints, offsets
from .context_parallel import from_metadata, set_padding
from .runs import requests_of, row_runs, tokens_of, write_runs
from .selections import from_topk
from .windows import Window, attention_rule

MOST_PAIRS = 4_000_000  # query-key pairs in a document
_Calls = Sequence[tuple[int, Any]]


def from_striped_writes(
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    tables: Sequence[Any],
    writes: Sequence[tuple[Any, Any]],
    placement: Any,
    *,
    page_size: int,
    num_pages: int | None = None,
) -> dict[str, Any]:
    """Make a document of the writes of ranks into sharded pools.

    Parameters
    ----------
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each sequence.
    tables : sequence of ints [bs, pages]
        Logical pages of each sequence.
    writes : sequence of (ints, ints)
        For each rank, the numbers of the new tokens that it writes, counted over the batch, and the
        rows of its own pool, as sglang's ``_get_write_plan`` returns them.
    placement : cpattn.kv.Placement
        Map from a rank's rows to logical slots.
    page_size : int
        Tokens per page.
    num_pages : int, optional
        Logical pages of all pools together; without it, bounds are not checked.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Examples
    --------
    >>> from cpattn.kv import PageInterleave
    >>> from cpattn_proof import lint
    >>> placement = PageInterleave(shard_size=2, page_size=2)
    >>> writes = [([0, 1], [2, 3]), ([2], [2])]
    >>> options = {"page_size": 2, "num_pages": 6}
    >>> lint(from_striped_writes([3], [0], [[2, 3]], writes, placement, **options)).proved
    True
    """
    extend, prefix = ints(extend_lens), ints(prefix_lens)
    batch = tokens_of(np.arange(int(extend.sum())), extend, prefix)
    ranks = [
        {"writes": _writes(rank, *of_rank, batch, placement)} for rank, of_rank in enumerate(writes)
    ]
    return {
        "schema": SCHEMA,
        "requests": requests_of(extend, prefix),
        "cache": _cache(tables, page_size, num_pages),
        "ranks": ranks,
    }


def from_sharded_plans(
    plans: Sequence[Any],
    num_pages: int | None = None,
    *,
    causal: bool = True,
    window: Window = None,
) -> dict[str, Any]:
    """Make a document of the plans of all ranks of a `ContextParallel` with a placement.

    Parameters
    ----------
    plans : sequence of ShardedPlan or of DecodePlan
        Results of `ContextParallel.plan` or `ContextParallel.plan_decode`, one of each rank, in
        order, without masks.
    num_pages : int, optional
        Logical pages of all pools together; without it, bounds are not checked.
    causal : bool
        Whether attention has a causal mask.
    window : int or pair, optional
        Number of visible keys before a query's own, or before and after; None for all.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`: rows, slots, and the pages of the pools of all ranks that
        attention reads for each row.

    Raises
    ------
    NotUsable
        If plans have masks, or rows and keys make more than `MOST_PAIRS` pairs.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import PageInterleave
    >>> from cpattn_proof import lint
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4,
    ...                      placement=PageInterleave(shard_size=1, page_size=4))
    >>> plan = cp.plan([3], [5], block_tables=[[2, 0]])
    >>> report = lint(from_sharded_plans([plan], num_pages=3))
    >>> report.proved, report.checked
    (True, ('OWN', 'COV', 'LEN', 'ADDR', 'PAD'))
    >>> dist.destroy_process_group()
    """
    whole = plans[0].batch
    if whole.mask is not None:
        raise NotUsable("from_sharded_plans: plans must have no masks")
    decode = not hasattr(plans[0], "metadata")
    lengths = ints(whole.shares.kv_lens)
    extend = _new_tokens(plans, lengths)
    prefix = lengths - extend
    if decode:
        rows = row_runs(whole.rows.request, whole.rows.position)
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "requests": requests_of(extend, prefix),
            "queries": "all",
            "ranks": [{"rows": rows} for _ in plans],
        }
    else:
        metadata = [plan.metadata for plan in plans]
        document = from_metadata(metadata, extend.tolist(), prefix.tolist())
        set_padding(document, plans[0].num_padding_tokens)
    tables = _tables(whole.shares)
    document["cache"] = _cache(tables, plans[0].page_size, num_pages)
    left, right = window if isinstance(window, tuple) else (window, None)
    sides = None if left is None and right is None else (left, right)
    document["attention"] = attention_rule(window, causal=causal)
    batch = tokens_of(np.arange(int(extend.sum())), extend, prefix)
    slots = _Slots(tables, lengths, plans[0].page_size)
    owners = range(plans[0].placement.shard_size)
    for rank, (part, plan) in enumerate(zip(document["ranks"], plans, strict=True)):
        local = ints(plan.local_slots)
        tokens = np.flatnonzero(local[: len(batch[0])] >= 0)
        part["writes"] = _writes(rank, tokens, local[tokens], batch, plan.placement)
        mine = slice(0, plan.num_tokens) if decode else plan.local_rows
        sources = [rank] if decode else owners
        calls = [
            (source, call)
            for source in sources
            if (call := plan.batch.call(source, mine, causal=causal, window=sides))
        ]
        request, position = whole.rows.request[mine], whole.rows.position[mine]
        real = position < lengths[request]
        part["segments"] = _segments(calls, request, real, slots, plan.placement)
    return document


def from_sharded_topk(
    plans: Sequence[Any], indices: Sequence[Any], *, topk: int, scores: Any = None
) -> dict[str, Any]:
    """Make a document of the keys that queries select from sharded keys, in a decode step.

    Parameters
    ----------
    plans : sequence of DecodePlan
        Results of `ContextParallel.plan_decode`, one of each rank, in order.
    indices : sequence of ints [num_tokens, n]
        For each rank, the rows of its own pool that each query attends to, -1 for none.
    topk : int
        Number of keys that a query selects, over all ranks.
    scores : float array [num_tokens, keys], optional
        For each query, the scores of all keys of its sequence, as in `from_topk`.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        As for `from_topk`.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import PageInterleave
    >>> from cpattn_proof import lint
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4,
    ...                      placement=PageInterleave(shard_size=1, page_size=4))
    >>> plan = cp.plan_decode([5], block_tables=[[2, 1]])
    >>> scores = [[3, 1, 4, 1, 5]]
    >>> lint(from_sharded_topk([plan], [[[10, 4]]], topk=2, scores=scores)).proved
    True
    >>> lint(from_sharded_topk([plan], [[[8, 4]]], topk=2, scores=scores)).proved
    False
    >>> dist.destroy_process_group()
    """
    whole = plans[0].batch
    lengths = ints(whole.shares.kv_lens)
    extend = _new_tokens(plans, lengths)
    slots = _Slots(_tables(whole.shares), lengths, plans[0].page_size)
    request = whole.rows.request
    queries = [(request, whole.rows.position)] * len(plans)
    positions = []
    for rank, chosen in enumerate(indices):
        rows = np.array(chosen, np.int64)
        for line, owner in zip(rows, request, strict=True):
            there = line >= 0
            logical = _slots_of(plans[0].placement, rank, line[there])
            line[there] = slots.positions(int(owner), logical)
        positions.append(rows)
    return from_topk(
        extend.tolist(), (lengths - extend).tolist(), queries, positions, topk=topk,
        scores=None if scores is None else [scores] * len(plans),
    )  # fmt: skip


def _new_tokens(plans: Sequence[Any], lengths: Ints) -> Ints:
    """Count the new tokens of each request, without padding after the last."""
    rows = plans[0].batch.rows
    real = rows.position < lengths[rows.request]
    return ints(np.bincount(rows.request[real], minlength=len(lengths)))


def _tables(shares: Any) -> list[list[int]]:
    """Return the logical pages of each request."""
    pages = shares.pages
    return [ids.tolist() for ids in np.split(pages.ids, pages.indptr[1:-1])]


def _cache(tables: Sequence[Any], page_size: int, num_pages: int | None) -> dict[str, Any]:
    """Return one cache of logical pages, shared by all ranks."""
    cache = {
        "page_size": page_size,
        "shared": True,
        "tables": [ints(row).tolist() for row in tables],
    }
    return cache | ({} if num_pages is None else {"num_pages": num_pages})


def _writes(
    rank: int, tokens: Any, rows: Any, batch: tuple[Ints, Ints], placement: Any
) -> dict[str, list[int]]:
    request, position = (values[ints(tokens)] for values in batch)
    return write_runs(request, position, _slots_of(placement, rank, ints(rows)))


def _slots_of(placement: Any, rank: int, rows: Ints) -> Ints:
    """Return the logical slots of rows of a rank's pool."""
    if not hasattr(placement, "global_index"):
        raise NotUsable(
            "from_sharded_plans, from_sharded_topk, from_striped_writes: placement must have a "
            f"method global_index, got {type(placement).__name__}"
        )
    return ints(placement.global_index(rank, rows))


class _Slots:
    """Positions of logical slots in their requests."""

    def __init__(self, tables: list[list[int]], lengths: Ints, page_size: int) -> None:
        self._lengths, self._page_size = lengths, page_size
        self._page = [{page: i for i, page in enumerate(row)} for row in tables]

    def positions(self, request: int, slots: Ints) -> Ints:
        """Return positions; slots of other requests give the length of the request."""
        pages = self._page[request]
        index = ints([pages.get(int(slot) // self._page_size, -1) for slot in slots])
        found = index * self._page_size + slots % self._page_size
        return np.where(index < 0, self._lengths[request], found)


def _segments(
    calls: _Calls, request: Ints, real: Any, slots: _Slots, placement: Any
) -> dict[str, list[int]]:
    """Return a line for each row without padding, and each run of its visible positions."""
    lines: list[tuple[int, int, int, int]] = []
    pairs = 0
    for source, call in calls:
        q_begin, kv_begin = offsets(ints(call.q_lens)), ints(call.kv_indptr)
        first_byte = 0  # of a sequence's mask
        for number in range(len(q_begin) - 1):
            rows = ints(call.rows)[q_begin[number] : q_begin[number + 1]]
            pages = ints(call.kv_indices)[kv_begin[number] : kv_begin[number + 1]]
            if not len(rows) or not len(pages):
                continue
            local = (pages[:, None] * call.page_size + np.arange(call.page_size)).ravel()
            size = (len(pages) - 1) * call.page_size + int(ints(call.last_page_len)[number])
            owner = int(request[rows[0]])
            read = slots.positions(owner, _slots_of(placement, source, local[:size]))
            pairs += len(rows) * size
            if pairs > MOST_PAIRS:
                raise NotUsable(f"from_sharded_plans: rows see more than {MOST_PAIRS:,} keys")
            if call.packed_custom_mask is None:
                ranges = call.key_ranges.reshape(-1, 2)[q_begin[number] : q_begin[number + 1]]
                begin, end = ranges.T[:, :, None]
                visible = (begin <= np.arange(size)) & (np.arange(size) < end)
            else:
                count = len(rows) * size
                bits = call.packed_custom_mask[first_byte:]
                visible = np.unpackbits(bits, count=count, bitorder="little").astype(bool)
                visible = visible.reshape(len(rows), size)
                first_byte += -(-count // 8)
            for row, sees in zip(rows[real[rows]], visible[real[rows]], strict=True):
                lines += _runs_of(int(request[row]), int(row), read[sees])
    names = ("request", "row", "first", "keys")
    columns = {name: [line[i] for line in lines] for i, name in enumerate(names)}
    return columns | {"rows": [1] * len(lines), "step": [0] * len(lines)}


def _runs_of(request: int, row: int, positions: Ints) -> list[tuple[int, int, int, int]]:
    if not len(positions):
        return []
    begins = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    counts = np.diff(np.append(begins, len(positions)))
    return [
        (request, row, int(positions[begin]), int(count))
        for begin, count in zip(begins, counts, strict=True)
    ]
