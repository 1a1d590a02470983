# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: a document for each batch that all ranks planned, with their messages.

For vLLM's GPU worker they have segments of prefill context parallelism, and local lengths and block
tables of decode context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ...captures import Capture, RecordedCall
from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints
from .decode import from_local_lens
from .pcp import from_segments
from .runs import requests_of, row_runs, tokens_of, write_runs

_BATCH, _DECODE = _BATCHES = ("ContextParallel.plan", "ContextParallel.plan_decode")
_POST = "RowExchange.post"
_LAYOUT = "PCPManager._build_batch_layout"
_TABLES, _APPEND = "BlockTables.__init__", "BlockTables.append_block_ids"
_STEP = "GPUModelRunner.prepare_attn"


def from_capture(capture: Capture) -> list[dict[str, Any]]:
    """Make a document of each batch in the captures of all ranks of a `ContextParallel`.

    Without a `ContextParallel`, each batch that ranks of vLLM's ``PCPManager`` laid out gives a
    document, with the segments of each rank from its own record; and so does each step of decode
    context parallelism, with the local lengths and block tables of each rank. Tensor-parallel ranks
    with the same context-parallel rank give separate documents.

    Parameters
    ----------
    capture : Capture
        Result of `cpattn_proof.read_captures`.

    Returns
    -------
    list of dict
        Documents of the schema `SCHEMA`: rows, tables, slots and, in order, the messages of ranks
        until the next batch was planned.

    Raises
    ------
    NotUsable
        If no batch was planned by `ContextParallel.plan`, a rank is missing, or ranks planned
        different numbers of batches, or laid out batches of different lengths.
    """
    layouts, shares = capture.of(_LAYOUT), list(_shares(capture))
    if not capture.of(*_BATCHES) and (layouts or shares):
        return [
            {**document, "name": f"batch {number}"}
            for number, document in enumerate(_laid_out(layouts) + _laid_out(shares))
        ]
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


def _laid_out(layouts: list[RecordedCall]) -> list[dict[str, Any]]:
    """Return documents of vLLM's layouts, for each set of context-parallel ranks."""
    if not layouts:
        return []
    processes: dict[int, list[RecordedCall]] = {}
    for call in layouts:
        processes.setdefault(call.rank, []).append(call)
    size = layouts[0].fields["cp_size"]
    of_ranks: list[list[list[RecordedCall]]] = [[] for _ in range(size)]
    for calls in processes.values():
        cp_rank = calls[0].fields["cp_rank"]
        for call in calls:
            found = call.fields["cp_rank"], call.fields["cp_size"]
            if found != (cp_rank, size) or cp_rank >= size:
                raise NotUsable(
                    f"from_capture: {call.file}, line {call.line}: must be of one rank of {size}, "
                    f"got rank {found[0]} of {found[1]}"
                )
        of_ranks[cp_rank].append(calls)
    if len(set(map(len, of_ranks))) > 1:
        counts = list(map(len, of_ranks))
        raise NotUsable(f"from_capture: capture must have as many of each rank, got {counts}")
    documents = []
    for ranks in zip(*of_ranks, strict=True):
        batches = list(map(len, ranks))
        if len(set(batches)) > 1:
            raise NotUsable(f"from_capture: ranks must have laid out as many, got {batches}")
        documents += [_layout(calls) for calls in zip(*ranks, strict=True)]
    return documents


def _layout(calls: tuple[RecordedCall, ...]) -> dict[str, Any]:
    extend, prefix = (ints(calls[0].fields[name]) for name in ("extend_lens", "prefix_lens"))
    segments = []
    for rank, call in enumerate(calls):
        where = f"from_capture: {call.file}, line {call.line}"
        lens = call.fields["extend_lens"], call.fields["prefix_lens"]
        if not all(map(np.array_equal, lens, (extend, prefix))) or len(extend) != len(prefix):
            raise NotUsable(f"{where}: lengths must be those of rank 0 in this batch")
        if call.name == _STEP:
            continue
        columns = call.fields["segments"].T
        if len(columns) != 6 or (columns.size and columns[1].max() >= len(extend)):
            raise NotUsable(f"{where}: segments must have 6 columns, of {len(extend)} requests")
        segments.append(columns[1:, columns[0] == rank])
    if calls[0].name == _STEP:
        fields = [call.fields for call in calls]
        return from_local_lens(
            (extend + prefix).tolist(),
            [one["local_seq_lens"] for one in fields],
            [one["block_tables"] for one in fields],
            block_size=fields[0]["block_size"],
            interleave=fields[0]["interleave"],
            query_lens=extend.tolist(),
        )
    return from_segments(segments, extend.tolist(), prefix.tolist())


def _shares(capture: Capture) -> Iterator[RecordedCall]:
    """Return each step of DCP, once for each sharded cache, with its block tables."""
    for rank in capture.ranks:
        tables: dict[str, Any] = {}
        blocks: dict[int, list[list[int]]] = {}  # by request, for each cache
        for call in capture.calls:
            if call.rank != rank or call.name not in (_TABLES, _APPEND, _STEP):
                continue
            fields = call.fields
            if call.name == _TABLES:
                tables, blocks = dict(fields), {}
                continue
            caches = len(tables.get("block_sizes", ()))
            if call.name == _APPEND and len(fields["block_ids"]) == caches:
                old = blocks.get(fields["request"])
                kept = [[]] * caches if old is None or fields["overwrite"] else old
                pairs = zip(kept, fields["block_ids"], strict=True)
                blocks[fields["request"]] = [had + new for had, new in pairs]
                continue
            if call.name == _APPEND or not blocks.keys() >= set(fields["requests"].tolist()):
                raise NotUsable(
                    f"from_capture: {call.file}, line {call.line}: no {_TABLES} or {_APPEND} of "
                    "these requests and caches before it: record from the start of the worker on"
                )
            chosen = [blocks[one] for one in fields["requests"].tolist()]
            for number in np.flatnonzero(tables["dcp_sharded"]).tolist():
                rows = [of_caches[number] for of_caches in chosen]
                width = max(map(len, rows), default=0)
                more = {
                    "block_tables": [row + [-1] * (width - len(row)) for row in rows],
                    "block_size": tables["block_sizes"][number],
                    "interleave": tables["interleave"],
                }
                yield replace(call, fields={**fields, **more})


def _steps(capture: Capture, rank: int) -> Iterator[tuple[RecordedCall, list[RecordedCall]]]:
    """Return each batch of a rank, and its messages until the next."""
    batch: RecordedCall | None = None
    posts: list[RecordedCall] = []
    for call in capture.calls:
        if call.rank != rank:
            continue
        if call.name in _BATCHES:
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
    first = of_ranks[0][0]
    fields, tokens = first.fields, len(first.fields["slots"])
    extend = ints(fields["extend_lens"]).copy()
    totals = extend if fields["seq_lens"] is None else ints(fields["seq_lens"])
    if len(totals) != len(extend):
        raise NotUsable(
            f"from_capture: {first.file}, line {first.line}: seq_lens must be {len(extend)}, as "
            f"extend_lens, got {len(totals)}"
        )
    prefix = totals - extend
    requests, padding = requests_of(extend, prefix), tokens - int(extend.sum())
    if padding > 0 and requests:
        requests[-1]["pad"] = padding
        extend[-1] += padding
    for call, _ in of_ranks:
        rows, held = (call.fields.get(name) for name in ("local_q_indices", "held_slots"))
        if (
            call.name != first.name
            or {tokens} != {len(call.fields["slots"]), tokens if held is None else len(held)}
            or (rows is not None and rows.size and rows.max() >= tokens)
        ):
            raise NotUsable(
                f"from_capture: {call.file}, line {call.line}: must be a {first.name} of {tokens} "
                "new tokens, as that of rank 0 in this batch"
            )
    batch = tokens_of(np.arange(tokens), extend, prefix)
    size = len(of_ranks)
    document = {
        "schema": SCHEMA,
        "name": f"batch {number}, {size} rank{'s' * (size != 1)}{_loads(of_ranks, batch)}",
        "requests": requests,
        "cache": {
            "page_size": fields["page_size"],
            "shared": fields["placement"] is not None,
            "tables": fields["block_tables"].tolist(),
        },
        "ranks": [_rank(call, posts, batch) for call, posts in of_ranks],
    }
    return document | ({"queries": "all"} if first.name == _DECODE else {})


def _loads(
    of_ranks: tuple[tuple[RecordedCall, list[RecordedCall]], ...], batch: tuple[Ints, Ints]
) -> str:
    """Return the largest load over the mean, for query-key pairs and for kept keys."""
    fields = [call.fields for call, _ in of_ranks]
    loads = {"keys": [one["held_keys"] for one in fields]}
    if "local_q_indices" in fields[0]:
        loads["pairs"] = [int((batch[1][one["local_q_indices"]] + 1).sum()) for one in fields]
    return "".join(
        f", {name} {max(of_rank) * len(of_rank) / max(sum(of_rank), 1):.3f} x the mean"
        for name, of_rank in loads.items()
        if None not in of_rank
    )


def _rank(
    call: RecordedCall, posts: list[RecordedCall], batch: tuple[Ints, Ints]
) -> dict[str, Any]:
    fields = call.fields
    request, position = batch
    own = fields.get("local_q_indices", slice(None))
    step = fields["cp_size"] if fields.get("strategy") == "interleave" else 1
    slots = fields["slots"] if fields["held_slots"] is None else fields["held_slots"]
    return {
        "rows": row_runs(request[own], position[own], step),
        "tables": fields["block_tables"].tolist(),
        "writes": write_runs(request, position, slots),
        "collectives": [message for post in posts for message in _messages(post)],
    }


def _messages(post: RecordedCall) -> Iterator[dict[str, Any]]:
    """Return the bytes to and from each rank; empty tensors do not travel."""
    for kind, peers in (("recv", post.fields["receives"]), ("send", post.fields["sends"])):
        for peer, size in peers.items():
            if size:
                label = post.fields["exchange"]
                yield {"kind": kind, "peer": int(peer), "size": size, "label": label}
