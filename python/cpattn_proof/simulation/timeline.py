# SPDX-License-Identifier: Apache-2.0
"""Bytes and times of a run, for people and for Perfetto."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from ..findings import Report
from .link import Link
from .run import Run

_TRACKS = {"compute": 0, "wait": 0, "transfer": 1}


def counts_of(run: Run) -> dict[str, Any]:
    """Return calls and bytes by name and rank, and the predicted time."""
    calls: dict[str, list[int]] = defaultdict(lambda: [0] * run.size)
    sent: dict[str, list[int]] = defaultdict(lambda: [0] * run.size)
    for rank, history in enumerate(run.fabric.history):
        for call in history:
            calls[call.kind][rank] += 1
            sent[call.kind][rank] += call.sent_bytes
    ends = [max([event.end for event in run.link.events if event.rank == r], default=0.0)
            for r in range(run.size)]  # fmt: skip
    return {
        "calls_by_rank": dict(calls),
        "sent_bytes_by_rank": dict(sent),
        "predicted_seconds_by_rank": ends,
    }


def write_trace(link: Link, path: str | os.PathLike[str]) -> None:
    """Write the timeline in the format of Chrome's trace viewer, with two tracks per rank."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in range(link.size)
    ]
    events += [
        {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for rank in range(link.size)
        for tid, name in enumerate(("rank", "link"))
    ]
    events += [
        {
            "ph": "X",
            "pid": event.rank,
            "tid": _TRACKS[event.kind],
            "ts": event.begin * 1e6,
            "dur": (event.end - event.begin) * 1e6,
            "cat": event.kind,
            "name": event.name,
            "args": {"sent_bytes": event.num_bytes, "place": event.place},
        }
        for event in link.events
    ]
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def write_page(report: Report, link: Link, path: str | os.PathLike[str]) -> None:
    """Write report and timeline as a page."""
    from ..page import Stretch, write_html

    names = ("rank", "name", "begin", "end", "kind", "place")
    stretches = [Stretch(*(getattr(event, name) for name in names)) for event in link.events]
    write_html([report], path, stretches=stretches)
