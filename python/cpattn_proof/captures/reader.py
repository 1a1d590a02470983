# SPDX-License-Identifier: Apache-2.0
"""Reader of captures of one or more processes."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..findings import NotUsable
from .fields import CALLS, HEADER, RECORD, Rule, fault_of
from .records import Room, from_line

SCHEMA = "cpattn-capture/1"  # as written by cpattn.captures
_OUTER = "ContextParallel.plan"
_PLANS_OF_BATCHES = (
    _OUTER,
    "ContextParallel.plan_decode",
    "build_cp_metadata",
    "build_cp_metadata_all_ranks",
)


@dataclass(frozen=True)
class RecordedCall:
    """Call in a capture.

    Attributes
    ----------
    name : str
        Name by which users call it.
    rank : int
        Rank of the calling process.
    at, seconds : float
        Begin, counted from the begin of the capture, and duration.
    fields : mapping
        Recorded fields.
    file, line : str, int
        Place in the capture.
    """

    name: str
    rank: int
    at: float
    seconds: float
    fields: Mapping[str, Any]
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class RecordedBatch:
    """Lengths of a step: new tokens of each sequence, and cached tokens including the new ones."""

    call: RecordedCall
    extend_lens: list[int]
    seq_lens: list[int]


@dataclass(frozen=True)
class Capture:
    """Recorded calls of the processes of a run.

    Attributes
    ----------
    headers : tuple of mapping
        Version, instruction set, host, pid and rank of each file.
    calls : tuple of RecordedCall
        Calls process by process, in the order in which they returned.
    truncated : tuple of Path
        Files with an incomplete last line: their process ended without closing them.

    Examples
    --------
    >>> Capture(headers=({"rank": 1}, {"rank": 0}), calls=()).ranks
    (1, 0)
    """

    headers: tuple[Mapping[str, Any], ...]
    calls: tuple[RecordedCall, ...]
    truncated: tuple[Path, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each process."""
        return tuple(header["rank"] for header in self.headers)

    def of(self, *names: str) -> list[RecordedCall]:
        """Return the calls of these names."""
        return [call for call in self.calls if call.name in names]

    @cached_property
    def batches(self) -> tuple[RecordedBatch, ...]:
        """Return the planned batches, each once, though every rank planned it.

        They are those of the lowest rank; if it planned none for context parallelism, those of its
        attention plans.
        """
        first = min(self.ranks)
        own = [call for call in self.calls if call.rank == first]
        planned = [call for call in own if call.name in _PLANS_OF_BATCHES]
        if outer := _not_within_plans(planned):
            return tuple(map(_planned_batch, outer))
        return tuple(
            RecordedBatch(call, call.fields["q_lens"].tolist(), call.fields["kv_lens"].tolist())
            for call in own
            if call.name == "plan_attention"
        )


def _not_within_plans(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return calls outside of any `ContextParallel.plan`, in order.

    A call inside begins no earlier than the plan, and ends no later. Long captures have a million
    calls, too many to compare in pairs.
    """
    plans = sorted((call for call in calls if call.name == _OUTER), key=lambda call: call.at)
    begins = [call.at for call in plans]
    ends = list(accumulate((call.at + call.seconds for call in plans), max))  # latest up to each

    def is_part(call: RecordedCall) -> bool:
        before = bisect_right(begins, call.at)
        return before > 0 and call.at + call.seconds <= ends[before - 1]

    return [call for call in calls if call.name == _OUTER or not is_part(call)]


def _planned_batch(call: RecordedCall) -> RecordedBatch:
    extends, totals = call.fields["extend_lens"], call.fields["seq_lens"]
    extends = totals if extends is None else extends
    if extends is None:  # None stands for one sequence
        return RecordedBatch(call, [call.fields["num_tokens"]], [call.fields["num_tokens"]])
    totals = extends if totals is None or len(totals) != len(extends) else totals
    return RecordedBatch(call, extends.tolist(), totals.tolist())


def read_captures(paths: Sequence[str | os.PathLike[str]]) -> Capture:
    """Read files of `cpattn.captures.capture`, of one process or several.

    Parameters
    ----------
    paths : sequence of paths
        One file of each process. Files without a call are left out if another file has one.

    Returns
    -------
    Capture
        Capture in rank order. It has arrays only for calls and fields that its readers use.

    Raises
    ------
    NotUsable
        If there is no file, two files are of one rank, a file cannot be read or is no capture
        (names the line), or the arrays of all files together exceed 2 GiB.

    Examples
    --------
    >>> import cpattn, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with cpattn.captures.capture(f"{folder}/run.cpcap") as path:
    ...         plan = cpattn.build_cp_metadata([10], [15], cp_rank=0, cp_size=2)
    ...     found = read_captures([path])
    >>> found.calls[0].name, found.batches[0].seq_lens
    ('build_cp_metadata', [15])
    """
    if not paths:
        raise NotUsable("read_captures: paths must name at least one file, got none")
    room = Room()
    parts = sorted((_read(Path(path), room) for path in paths), key=lambda part: part[0]["rank"])
    if any(calls for _, calls, _ in parts):  # a process that only starts others has none
        parts = [part for part in parts if part[1]]
    ranks = [header["rank"] for header, _, _ in parts]
    if len(set(ranks)) < len(ranks):
        raise NotUsable(f"read_captures: each file must be of another rank, got ranks {ranks}")
    return Capture(
        headers=tuple(header for header, _, _ in parts),
        calls=tuple(call for _, calls, _ in parts for call in calls),
        truncated=tuple(path for _, _, path in parts if path is not None),
    )


def _read(path: Path, room: Room) -> tuple[dict[str, Any], list[RecordedCall], Path | None]:
    """Return header and calls of a file, and its path if it ends within a line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise NotUsable(f"{path}: {error.strerror or error}") from None
    whole = lines.pop() == b""
    header = _record(path, 1, lines[0] if lines else b"", room)
    schema = header.get("schema")
    if not isinstance(schema, str) or schema != SCHEMA:
        raise NotUsable(f"{path}: schema must be {SCHEMA}, got {str(schema)[:40]!r}")
    _check(path, 1, header, HEADER)
    calls = []
    for number, line in enumerate(lines[1:], 2):
        record = _record(path, number, line, room)
        _check(path, number, record, RECORD)
        name, at, seconds = (record.pop(key) for key in RECORD)
        _check(path, number, record, CALLS.get(name, {}))
        calls.append(RecordedCall(name, header["rank"], at, seconds, record, str(path), number))
    return header, calls, None if whole else path


def _check(path: Path, number: int, record: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    if fault := fault_of(record, rules):
        raise NotUsable(f"{path}, line {number}: {fault}")


def _record(path: Path, number: int, line: bytes, room: Room) -> dict[str, Any]:
    try:
        return from_line(line, room, CALLS)
    except (ValueError, RecursionError) as error:
        raise NotUsable(f"{path}, line {number}: no record of a capture: {error}") from None
