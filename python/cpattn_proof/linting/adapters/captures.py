# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: a document for each batch that all ranks planned, with what they sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...captures import Capture, RecordedCall
from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints
from .runs import requests_of, row_runs, tokens_of, write_runs

_BATCH, _POST = "ContextParallel.plan", "RowExchange.post"


def from_capture(capture: Capture) -> list[dict[str, Any]]:
    """Make a document of each batch in the captures of all ranks of a `ContextParallel`.

    Parameters
    ----------
    capture : Capture
        Of `cpattn_proof.read_captures`.

    Returns
    -------
    list of dict
        Documents of the schema `SCHEMA`: rows, tables, slots and, in their order, what ranks sent
        until the next batch was planned.

    Raises
    ------
    NotUsable
        If no batch was planned by `ContextParallel.plan`, a rank is missing, or the ranks planned
        unequal numbers of batches.
    """
    steps = [list(_steps(capture, rank)) for rank in capture.ranks]
    counts = [len(of_rank) for of_rank in steps]
    if not any(counts):
        raise NotUsable(f"from_capture: there is no call of {_BATCH}")
    if len(set(counts)) > 1:
        raise NotUsable(f"from_capture: ranks must have planned as many batches, got {counts}")
    size = steps[0][0][0].fields["cp_size"]
    if size != len(steps):
        raise NotUsable(f"from_capture: capture must be of {size} ranks, got {len(steps)}")
    return [_document(number, of_ranks) for number, of_ranks in enumerate(zip(*steps, strict=True))]


def _steps(capture: Capture, rank: int) -> Iterator[tuple[RecordedCall, list[RecordedCall]]]:
    """Each batch of a rank, and what was posted until the next."""
    batch: RecordedCall | None = None
    posts: list[RecordedCall] = []
    for call in capture.calls:
        if call.rank != rank:
            continue
        if call.name == _BATCH:
            if batch is not None:
                yield batch, posts
            batch, posts = call, []
        elif call.name == _POST:
            posts.append(call)
    if batch is not None:
        yield batch, posts


def _document(
    number: int, of_ranks: tuple[tuple[RecordedCall, list[RecordedCall]], ...]
) -> dict[str, Any]:
    first = of_ranks[0][0].fields
    extend = ints(first["extend_lens"]).copy()
    totals = first["seq_lens"]
    prefix = np.zeros_like(extend) if totals is None else ints(totals) - extend
    if len(extend):
        extend[-1] += len(first["slots"]) - int(extend.sum())  # padding counts as its tokens
    batch = tokens_of(np.arange(int(extend.sum())), extend, prefix)
    return {
        "schema": SCHEMA,
        "name": f"batch {number}",
        "requests": requests_of(extend, prefix),
        "cache": {"page_size": first["page_size"], "tables": first["block_tables"].tolist()},
        "ranks": [_rank(call, posts, batch) for call, posts in of_ranks],
    }


def _rank(
    call: RecordedCall, posts: list[RecordedCall], batch: tuple[Ints, Ints]
) -> dict[str, Any]:
    fields = call.fields
    request, position = batch
    own = fields["local_q_indices"]
    step = fields["cp_size"] if fields["strategy"] == "interleave" else 1
    return {
        "rows": row_runs(request[own], position[own], step),
        "tables": fields["block_tables"].tolist(),
        "writes": write_runs(request, position, fields["slots"]),
        "collectives": [message for post in posts for message in _messages(post)],
    }


def _messages(post: RecordedCall) -> Iterator[dict[str, Any]]:
    """Bytes to and from each rank; empty tensors do not travel."""
    for kind, peers in (("recv", post.fields["receives"]), ("send", post.fields["sends"])):
        for peer, size in peers.items():
            if size:
                label = post.fields["exchange"]
                yield {"kind": kind, "peer": int(peer), "size": size, "label": label}
