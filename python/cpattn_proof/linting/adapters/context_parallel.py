# SPDX-License-Identifier: Apache-2.0
"""Context-parallel metadata of all ranks: cpattn's own, or sglang's with the same names.

Missing fields, and fields that are None, are left out and not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints, offsets
from .runs import requests_of, row_runs, tokens_of, write_runs
from .windows import Window, pass_window


def from_metadata(
    metadata: Sequence[Any],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int] | None = None,
    *,
    causal: bool = True,
    window: Window = None,
) -> dict[str, Any]:
    """Make a document of the metadata of all ranks, in their order.

    Parameters
    ----------
    metadata : sequence of objects
        `ContextParallelMetadata`, or sglang's objects of the same fields.
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each sequence. Default of the latter: none are cached.
    causal : bool
        Whether attention has a causal mask; without it a query may see its whole sequence.
    window : int or pair, optional
        Number of visible keys before a query's own, or before and behind; attention gets the same
        window. Rows are placed as in `do_cp_attn_fia`, where the metadata has them. For calls with
        another window, or none, change ``segments`` of the document.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If the metadata has no field with the tokens of each rank.

    Examples
    --------
    >>> import cpattn
    >>> from cpattn_proof import lint
    >>> plans = cpattn.build_cp_metadata_all_ranks([13, 40], [13, 104], cp_size=4)
    >>> lint(from_metadata(plans, [13, 40], [0, 64])).proved
    True
    """
    extend = ints(extend_lens).copy()
    prefix = np.zeros_like(extend) if prefix_lens is None else ints(prefix_lens)
    total = getattr(metadata[0], "total_seq_lens", None) or int(extend.sum())
    if len(extend):
        extend[-1] += max(total - int(extend.sum()), 0)  # padding counts, too
    batch = (extend, prefix)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "requests": requests_of(extend, prefix),
        "ranks": [_rank(one, rank, len(metadata), batch) for rank, one in enumerate(metadata)],
    }
    if (restore := _restored(metadata[0], len(metadata))) is not None:
        document["restore"] = restore
    pass_window(document, window, causal=causal)
    return document


def from_plans(
    plans: Sequence[Any],
    num_pages: int | None = None,
    *,
    causal: bool = True,
    window: Window = None,
) -> dict[str, Any]:
    """Make a document of the plans of `ContextParallel.plan` of all ranks, with tables and slots.

    Parameters
    ----------
    plans : sequence of ContextParallelPlan
        Plans of all ranks in order, without masks.
    num_pages : int, optional
        Pages of the pool; without it, bounds of pages are not checked.
    causal, window
        Arguments of `ContextParallel.attend`, as in `from_metadata`. Pages wholly before the window
        need not exist.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        As for `from_metadata`, and if plans have masks.
    """
    if plans[0].packed_custom_mask is not None:
        raise NotUsable("from_plans: plans must have no masks")
    prefix = ints(plans[0].metadata.prefix_lens)
    owners = [ints(plan.metadata.query_request_indices) for plan in plans]
    extend = ints(np.bincount(np.concatenate(owners), minlength=len(prefix)))
    metadata = [plan.metadata for plan in plans]
    document = from_metadata(
        metadata, extend.tolist(), prefix.tolist(), causal=causal, window=window
    )
    set_padding(document, plans[0].num_padding_tokens)
    document["cache"] = {
        "page_size": plans[0].page_size,
        "tables": np.asarray(plans[0].block_tables).tolist(),
        **({} if num_pages is None else {"num_pages": num_pages}),
    }
    request, position = tokens_of(np.arange(int(extend.sum())), extend, prefix)
    for rank, plan in zip(document["ranks"], plans, strict=True):
        rank["writes"] = write_runs(request, position, plan.slots)
        rank["tables"] = np.asarray(plan.block_tables).tolist()
    return document


def set_padding(document: dict[str, Any], padding: int) -> None:
    """Mark the last tokens of the batch as padding, whose attention results are never read.

    With tables, keys of padding have no pages of their own.
    """
    if not padding:
        return
    last = len(document["requests"]) - 1
    request = document["requests"][last]
    request |= {"extend": request["extend"] - padding, "pad": padding}
    end = request["prefix"] + request["extend"]
    for part in document["ranks"]:
        calls = {name: ints(column) for name, column in part.get("segments", {}).items()}
        if calls:
            step = calls.get("step", np.ones_like(calls["rows"]))
            over = np.clip(-((end - calls["keys"]) // step), 0, calls["rows"])
            over[calls["request"] != last] = 0
            calls |= {"rows": calls["rows"] - over, "keys": calls["keys"] - over * step}
            real = calls["rows"] > 0
            part["segments"] = {name: column[real].tolist() for name, column in calls.items()}
    if "restore" in document:
        counts = ints(document["restore"]["count"])
        left = int(counts.sum()) - padding - offsets(counts)[:-1]
        document["restore"]["count"] = np.clip(left, 0, counts).tolist()


def _blocks(metadata: Any) -> tuple[Ints, Ints] | None:
    """Return the blocks of the batch, and those of this rank, if the metadata has them."""
    lengths, mine = getattr(metadata, "split_list", None), getattr(metadata, "zigzag_index", None)
    if not lengths or mine is None:
        return None
    return offsets(ints(lengths)), ints(mine)


def _rank(metadata: Any, rank: int, size: int, batch: tuple[Ints, Ints]) -> dict[str, Any]:
    """Return one rank's rows and calls."""
    blocks = _blocks(metadata)
    if blocks is None:
        return _interleaved(metadata, rank, size, batch)
    base, mine = blocks
    flat = [np.arange(base[block], base[block + 1]) for block in mine]
    owner, position = tokens_of(np.concatenate(flat), *batch) if flat else (ints([]), ints([]))
    part: dict[str, Any] = {"rows": row_runs(owner, position)}
    columns: dict[str, list[int]] = {name: [] for name in ("request", "row", "rows", "keys")}
    row = 0
    for half in ("prev", "next"):
        q_lens = getattr(metadata, f"actual_seq_q_{half}_list", None) or ()
        kv_lens = getattr(metadata, f"kv_len_{half}_list", None) or ()
        for request, (queries, keys) in enumerate(zip(q_lens, kv_lens, strict=True)):
            if queries:
                for name, value in zip(columns, (request, row, queries, keys), strict=True):
                    columns[name].append(int(value))
            row += int(queries)
    if row or not len(owner):
        part["segments"] = columns
    return part


def _interleaved(metadata: Any, rank: int, size: int, batch: tuple[Ints, Ints]) -> dict[str, Any]:
    """Return interleaved rows, each a sequence of its own; the metadata may name its keys."""
    total = int(batch[0].sum())
    flat = getattr(metadata, "local_q_indices", None)
    if flat is None:
        flat = getattr(metadata, "local_token_indices", None)
    if flat is None:
        counts = getattr(metadata, "per_rank_logical_token", None)
        counts = counts or getattr(metadata, "per_rank_actual_token", None)
        if counts is None:
            raise NotUsable("from_metadata: metadata must have split_list or per_rank_actual_token")
        flat = np.arange(int(counts[rank])) * size + rank
    flat = ints(flat)
    flat = flat[flat < total]
    owner, position = tokens_of(flat, *batch)
    part: dict[str, Any] = {"rows": row_runs(owner, position, size)}
    seen = getattr(metadata, "query_cache_lengths", None)
    if seen is not None:
        said = getattr(metadata, "query_request_indices", None)
        owner = ints(said)[: len(flat)] if said is not None else owner
        part["segments"] = rows_apart(owner, ints(seen)[: len(flat)], size)
    return part


def rows_apart(request: Ints, keys: Ints, step: int) -> dict[str, list[int]]:
    """Return calls of rows with keys of their own, joined where the keys grow by `step`."""
    if not len(request):
        return {"request": [], "row": [], "rows": [], "keys": []}
    begins = np.flatnonzero((np.diff(request) != 0) | (np.diff(keys) != step)) + 1
    begins = np.concatenate([[0], begins])
    ends = np.append(begins[1:], len(request))
    return {
        "request": request[begins].tolist(),
        "row": begins.tolist(),
        "rows": (ends - begins).tolist(),
        "keys": keys[ends - 1].tolist(),
        "step": [step] * len(begins),
    }


def _restored(metadata: Any, size: int) -> dict[str, list[int]] | None:
    """Return the runs of all ranks' rows that restore the batch; None without such fields."""
    counts = getattr(metadata, "per_rank_logical_token", None)
    counts = counts or getattr(metadata, "per_rank_actual_token", None)
    pieces, order = (getattr(metadata, n, None) for n in ("reverse_split_len", "cp_reverse_index"))
    if counts is None or not pieces or order is None:  # as with interleaved rows
        return None
    begins, ranks = offsets(ints(pieces)), offsets(ints(counts))
    at = begins[ints(order)]
    rank = np.clip(np.searchsorted(ranks, at, side="right") - 1, 0, size - 1)
    return {
        "rank": rank.tolist(),
        "row": (at - ranks[rank]).tolist(),
        "count": ints(pieces)[ints(order)].tolist(),
    }
