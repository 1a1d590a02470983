# SPDX-License-Identifier: Apache-2.0
"""Prompts and decode steps of all peers: checked, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean

from bench.harness.contender import Failed
from bench.harness.figures import Row
from bench.harness.sampling import Lane, measured, sample
from bench.models.peers import CORES, ENGINES, SDPA, Peer, Sizes
from bench.serving.steps import largest_difference
from bench.serving.turns import compare_tokens
from cpattn import _core


@dataclass(frozen=True)
class Case:
    """A prompt of `new` tokens, or `steps` decode steps of `batch` requests; behind cached ones."""

    new: int = 0
    cached: int = 0
    batch: int = 1
    steps: int = 0
    slow: bool = False  # for sdpa

    @property
    def name(self) -> str:
        if self.steps:
            return f"decode {self.batch} behind {self.cached}"
        return f"prompt of {self.new}" + f" behind {self.cached}" * bool(self.cached)

    @property
    def items(self) -> int:
        """Tokens that the timed call computes: a prompt, or a step."""
        return self.batch if self.steps else self.new

    @property
    def asked(self) -> tuple[str, dict[str, int]]:
        """Command of a peer, and its arguments."""
        if self.steps:
            return "decode", {"batch": self.batch, "cached": self.cached, "steps": self.steps}
        return "prefill", {"new": self.new, "cached": self.cached}


def cases(sizes: Sizes) -> list[Case]:
    return [
        Case(sizes.long, slow=True),
        Case(sizes.short),
        Case(sizes.new, cached=sizes.short),
        Case(batch=sizes.requests, cached=sizes.new, steps=sizes.steps),
    ]


@dataclass
class Turns:
    """A peer in a case, with new prompts each time, equal for all peers."""

    peer: Peer
    case: Case
    _seeds: Iterator[int] = field(default_factory=lambda: count(0, 1000))

    @property
    def name(self) -> str:
        return self.peer.name

    def run(self) -> Row:
        """One call, with the answers."""
        do, arguments = self.case.asked
        return self.peer.ask(do, **arguments, seed=next(self._seeds))

    def ask(self, do: str, *, calls: int) -> Row:
        """Seconds of one call."""
        return {"stage": 0.0, "run": self.run()["seconds"]}


def measure(
    peers: Sequence[Peer],
    case: Case,
    budget: float,
    dtype: str = "float32",
) -> list[Row]:
    """The rows of a case, those of engines on two ranks first."""
    lanes: list[Lane] = []
    kept: dict[str, list[int]] = {}
    failed: list[Row] = []
    expected = None
    for peer in peers:
        turns = Turns(peer, case)
        try:
            answer = turns.run()
            if expected is None:
                expected = answer["answers"]
            compare_tokens(expected, answer["answers"])
            error = largest_difference(expected, answer["answers"])
        except Failed as failure:
            failed.append(failure.row(peer.name))
            continue
        first = {"stage": 0.0, "run": answer["seconds"], "compiled": False}
        kept[peer.name] = answer["kept"]
        lanes.append(Lane(turns, first, error, budget))
    common: Row = {
        "part": "steps",
        "case": {"workload": case.name, "threads": CORES},
        "dtype": dtype,
    }
    peaks = sample(lanes, partial(_core.measure_peak, dtype, CORES)) if lanes else []
    rows = [common | measured(lane, peaks, None) for lane in lanes]
    for row in rows:
        if "median" not in row:
            continue
        row |= {"ns_per_item": 1e9 * row["median"] / case.items, "item": "token"}
        row["kept_bytes"] = kept[row["implementation"]]
    add_efficiency(rows)
    return [*reversed(rows), *(common | row for row in failed)]


def add_predictions(rows: Sequence[Row], forecasts: Sequence[Mapping[str, float]]) -> None:
    """Add to each engine's row the mean of its forecasts: a machine's rates drift meanwhile."""
    for row in rows:
        if "median" in row and all(row["implementation"] in forecast for forecast in forecasts):
            row["predicted"] = fmean(forecast[row["implementation"]] for forecast in forecasts)


def add_efficiency(rows: Sequence[Row]) -> None:
    """Add to engines on two ranks the time of one rank on both cores, as a share."""
    one, *others = (name for name in ENGINES)
    times = {row["implementation"]: row["median"] for row in rows if "median" in row}
    for row in rows:
        if row["implementation"] in others and one in times and "median" in row:
            row["efficiency"] = times[one] / row["median"]


def of_case(peers: Sequence[Peer], case: Case, *, long: bool) -> list[Peer]:
    """The peers that a case is for."""
    return [peer for peer in peers if long or not (case.slow and peer.name == SDPA)]
