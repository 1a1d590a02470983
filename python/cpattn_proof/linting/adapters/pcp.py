# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism (PCP) as in vLLM: segments of all ranks, and gathered rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints, offsets
from .runs import requests_of, tokens_of, write_runs
from .windows import pass_window


def from_segments(
    segments: Sequence[Any],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    *,
    seq_lens: Sequence[Sequence[int]] | None = None,
    replicated: Sequence[bool] | None = None,
    hidden_restore_idx: Any = None,
    padded_gather_idx: Any = None,
    gathered_slots: Any = None,
    window: int | None = None,
) -> dict[str, Any]:
    """Make a document of the segments of all ranks.

    Parameters
    ----------
    segments : sequence, for each rank
        Lists of vLLM's ``RankSegment``, as ``PCPManager._build_batch_layout`` returns them, or five
        int arrays, as `cpattn.context_parallel.vllm_0_32.pcp_segments` does.
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each request.
    seq_lens : sequence of ints [n], for each rank, optional
        Number of keys that the last token of each segment sees, as in vLLM's rank-local batch;
        default: all keys up to its own.
    replicated : bools [bs], optional
        Whether each rank has all new tokens of each request; default: derived from the segments.
    hidden_restore_idx : ints [sum of extend_lens], optional
        Padded row of each token; needs `padded_gather_idx`.
    padded_gather_idx : ints [ranks * padded rows], optional
        Token of each padded row.
    gathered_slots : ints [ranks * padded rows], optional
        Slot of each padded row, as ``_convert_to_gathered_slot_mappings`` returns them for one
        group of caches; below 0 for rows that are not written. Every rank writes all of them into
        its own cache. Needs `padded_gather_idx`.
    window : int, optional
        Number of visible keys before a query's own; attention gets the same window.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If padded rows come without `padded_gather_idx`, or are no multiple of the ranks.

    Examples
    --------
    >>> from cpattn.context_parallel.vllm_0_32 import build_pcp_layout
    >>> from cpattn_proof import lint
    >>> layout = build_pcp_layout([8, 1], [0, 5], pcp_size=2, shard_decode=False)
    >>> lint(from_segments(layout.segments, [8, 1], [0, 5])).proved
    True
    >>> short = [lens - 1 for lens in layout.seq_lens]
    >>> lint(from_segments(layout.segments, [8, 1], [0, 5], seq_lens=short)).findings[0].invariant
    'COV'
    """
    extend, prefix = ints(extend_lens), ints(prefix_lens)
    ranks = [segment_columns(rank) for rank in segments]
    if replicated is None:
        whole = [np.bincount(c[0], c[2] - c[1], len(extend)) == extend for c in ranks]
        replicated = np.logical_and.reduce(whole).tolist()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "requests": [
            {**request, "queries": "all" if everywhere else "split"}
            for request, everywhere in zip(requests_of(extend, prefix), replicated, strict=True)
        ],
        "ranks": [
            _rank(columns, extend, prefix, None if seq_lens is None else ints(seq_lens[rank]))
            for rank, columns in enumerate(ranks)
        ],
    }
    if hidden_restore_idx is not None:
        padded = _padded(padded_gather_idx, len(ranks))
        rank, row = np.divmod(ints(hidden_restore_idx), padded)
        document["restore"] = {
            "rank": rank.tolist(), "row": row.tolist(), "count": [1] * len(row)
        }  # fmt: skip
    if gathered_slots is not None:
        _padded(padded_gather_idx, len(ranks))
        owner, position = tokens_of(padded_gather_idx, extend, prefix)
        for part in document["ranks"]:
            part["writes"] = write_runs(owner, position, gathered_slots)
    pass_window(document, window, causal=True)
    return document


def segment_columns(rank: Any) -> list[Ints]:
    """Return request, begin and end in the batch, begin and end on the rank, of each segment."""
    if len(rank) == 0 or hasattr(rank[0], "global_batch_req_idx"):
        rows = [
            (
                one.global_batch_req_idx,
                one.global_batch_slice.start, one.global_batch_slice.stop,
                one.rank_local_batch_slice.start, one.rank_local_batch_slice.stop,
            )
            for one in rank
        ]  # fmt: skip
        rank = np.array(rows, np.int64).reshape(-1, 5).T
    return [ints(column) for column in rank]


def _rank(columns: list[Ints], extend: Ints, prefix: Ints, seq_lens: Ints | None) -> dict[str, Any]:
    """Return the rows of a rank, and a call for each segment."""
    request, begin, end, row, stop = columns
    position = begin - offsets(extend)[request] + prefix[request]
    order = np.argsort(row, kind="stable")
    keys = position + (end - begin) if seq_lens is None else seq_lens
    return {
        "rows": {
            "request": request[order].tolist(),
            "position": position[order].tolist(),
            "count": (end - begin)[order].tolist(),
        },
        "segments": {
            "request": request.tolist(), "row": row.tolist(), "rows": (stop - row).tolist(),
            "keys": keys.tolist(),
        },
    }  # fmt: skip


def _padded(padded_gather_idx: Any, size: int) -> int:
    """Return the rows of each rank with padding."""
    rows = 0 if padded_gather_idx is None else len(padded_gather_idx)
    if not rows or rows % size:
        raise NotUsable(
            f"from_segments: padded_gather_idx must have as many rows of each of {size} ranks, "
            f"got {rows}"
        )
    return rows // size
