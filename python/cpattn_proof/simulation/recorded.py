# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded runs: sizes and order of messages, without values."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..captures import Capture
from ..findings import Report
from ..requirements import require
from .calls import Call, Group, at_site
from .link import Event, Link
from .run import Run
from .simulate import check_number
from .steps import Exchange, Planned, Span, Step, check_usable, recorded_steps
from .timeline import counts_of, write_page, write_trace


@dataclass(frozen=True)
class CaptureOptions:
    """Options for the simulation of a recorded run.

    Attributes
    ----------
    ranks : int, optional
        Number of ranks instead of the recorded one; 1 to 64.
    strategy : str, optional
        Strategy for the recorded batches instead of the recorded one.
    time_limit : float
        Seconds.
    buffered_sends : bool
        Whether a send ends before its receive.
    latency_us, gbps : float
        Latency and rate of a rank's link: microseconds per message, 10^9 bits per second.
    trace, html : path, optional
        Files for the timeline (for Perfetto), and for report and timeline (as a page).
    require : sequence of str
        Ids of invariants that must be decided for a proof, see `cpattn_proof.require`.
    """

    ranks: int | None = None
    strategy: str | None = None
    time_limit: float = 60.0
    buffered_sends: bool = False
    latency_us: float = 10.0
    gbps: float = 100.0
    trace: str | os.PathLike[str] | None = None
    html: str | os.PathLike[str] | None = None
    require: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.ranks is not None:
            check_number("ranks", self.ranks, 1, 64, kind=int)
        check_number("time_limit", self.time_limit, 0.1, 86400)
        check_number("latency_us", self.latency_us, 0, 1e9)
        check_number("gbps", self.gbps, 1e-3, 1e6)
        if self.require:
            require(Report("simulate", ""), self.require)  # refuses unknown ids


def simulate_capture(capture: Capture, **options: Any) -> Report:
    """Replay what ranks of a `ContextParallel` planned and sent, and predict its time.

    Parameters
    ----------
    capture : Capture
        Capture of all ranks of one group, by `cpattn_proof.read_captures`.
    **options
        Attributes of `CaptureOptions`: ``ranks``, ``strategy``, ``time_limit``, ``buffered_sends``,
        ``latency_us``, ``gbps``, ``trace``, ``html``, ``require``. With ``ranks`` or ``strategy``
        the recorded batches are planned again: rows go where the new plans place them, and
        attention takes its recorded time per query-key pair.

    Returns
    -------
    Report
        Findings are of SEQ: plans that differ between ranks, messages with different sizes or with
        only one end. Facts have calls, bytes and predicted seconds of each rank.

    Raises
    ------
    NotUsable
        If no rank communicated, a rank is missing, or other ranks are requested for exchanges that
        depend on the placement of keys.

    Examples
    --------
    >>> from cpattn_proof import NotUsable
    >>> try:
    ...     simulate_capture(Capture(headers=({"rank": 0},), calls=()))
    ... except NotUsable as error:
    ...     print(str(error).partition(";")[0])
    simulate_capture: no rank planned or sent anything by a ContextParallel
    """
    if not isinstance(capture, Capture):
        raise TypeError(
            f"simulate_capture: capture must be a Capture, got {type(capture).__name__}"
        )
    chosen = CaptureOptions(**options)
    begin = time.perf_counter()
    steps = recorded_steps(capture)
    check_usable(steps)
    manner = "as recorded"
    if chosen.ranks is not None or chosen.strategy is not None:
        from .remade import remade_steps  # needs cpattn

        steps, manner = remade_steps(steps, chosen.ranks, chosen.strategy)
    link = _RecordedLink(len(steps), chosen.latency_us * 1e-6, chosen.gbps * 1e9 / 8)
    run = Run(len(steps), 0, link, buffered_sends=chosen.buffered_sends, has_values=False)
    run.execute(_Program(run, steps), [_NoState()] * len(steps), chosen.time_limit)
    if run.failure is not None:
        raise run.failure
    if chosen.trace is not None:
        write_trace(link, chosen.trace)
    report = Report(
        "simulate",
        f"{_batches_of(steps[0])} on {len(steps)} ranks, {manner}",
        tuple(run.findings),
        checked=("SEQ",),
        not_checked={"RES": "values are not recorded"},
        seconds=time.perf_counter() - begin,
        facts={"recorded_seconds_by_rank": _recorded_seconds(capture), **counts_of(run)},
    )
    if chosen.require:
        report = require(report, chosen.require)
    if chosen.html is not None:
        write_page(report, link, chosen.html)
    return report


def _batches_of(steps: Sequence[Step]) -> str:
    many = sum(isinstance(step, Planned) for step in steps)
    return f"{many:,} recorded batch{'es' * (many != 1)}"


def _recorded_seconds(capture: Capture) -> list[float]:
    """Return the seconds of each rank from its first recorded call to the end of its last."""
    seconds = []
    for rank in capture.ranks:
        calls = [call for call in capture.calls if call.rank == rank]
        ends = [call.at + call.seconds for call in calls]
        seconds.append(max(ends, default=0.0) - min((call.at for call in calls), default=0.0))
    return seconds


class _NoState:
    """Empty state: recorded ranks have no private process state."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


@dataclass
class _RecordedLink(Link):
    """Link with recorded computation times instead of CPU times."""

    def resume(self, rank: int) -> None:
        pass

    def pause(self, rank: int) -> None:
        pass

    def compute(self, rank: int, span: Span) -> None:
        begin = self.now[rank]
        self.now[rank] += span.seconds
        place = str(span.site)
        self.events.append(Event(rank, span.name, begin, self.now[rank], "compute", 0, place))

    def carry(self, calls: Sequence[Call]) -> None:
        if calls[0].kind not in Planned.KINDS:  # other kinds send nothing
            super().carry(calls)


@dataclass
class _Program:
    """Program in which each rank makes its recorded steps."""

    run: Run
    steps: Sequence[Sequence[Step]]
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        self.group = Group("recorded", tuple(range(len(self.steps))))

    def __call__(self, rank: int) -> None:
        for step in self.steps[rank]:
            with at_site(step.site):
                if isinstance(step, Span):
                    link = self.run.link
                    assert isinstance(link, _RecordedLink)
                    link.compute(rank, step)
                elif isinstance(step, Planned):
                    self.run.begin(Call(step.kind, self.group, rank, step.site, step.terms))
                else:
                    self._exchange(rank, step)

    def _exchange(self, rank: int, step: Exchange) -> None:
        works = []
        for direction, sizes in (("recv", step.receives), ("send", step.sends)):
            for peer, size in sizes.items():
                if size:  # empty blocks do not travel
                    blocks = {peer: [_block(size)]}
                    parts = {"takes" if direction == "recv" else "gives": blocks, "peer": peer}
                    call = Call(direction, self.group, rank, step.site, **parts)  # type: ignore[arg-type]
                    works.append(self.run.begin(call))
        for work in works:
            work.wait()


def _block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")
