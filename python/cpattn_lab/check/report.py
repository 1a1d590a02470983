# SPDX-License-Identifier: Apache-2.0
"""Report of `cpattn_lab.check`, as lines and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cpattn.context_parallel.exchanges import ON_ALL_RANKS

from ..rate_options import as_options
from .batch import PLACEMENTS, STRATEGIES

REPLICATED = "replicated"  # the way without sharded pools


@dataclass(frozen=True)
class CheckReport:
    """Answers of all ranks.

    Attributes
    ----------
    passed : bool
        Whether all rows of all ranks are correct.
    ranks : list of dict
        Host, versions, largest error and rates of each rank.
    network : dict
        Rates of the exchange; empty for one rank.
    exchanges : dict of str to float
        Seconds of a layer for each way.
    options : dict
        Options of the command.
    """

    passed: bool
    ranks: list[dict[str, Any]]
    network: dict[str, float]
    exchanges: dict[str, float]
    options: dict[str, Any]

    @property
    def fastest(self) -> str:
        """Fastest exchange of sharded pools."""
        return min(ON_ALL_RANKS, key=lambda name: self.exchanges[name])

    def to_json(self) -> str:
        """Return one document; a NaN error is null."""
        document = asdict(self) | {"fastest": self.fastest}
        document["ranks"] = [
            {key: None if value != value else value for key, value in rank.items()}
            for rank in self.ranks
        ]
        return json.dumps(document, allow_nan=False)

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        width = max(len(answer["host"]) for answer in self.ranks)
        for rank, answer in enumerate(self.ranks):
            yield (
                f"rank {rank:<2} {answer['host']:{width}}  CPUs {answer['cpus']}  "
                f"threads {answer['threads']}  {answer['isa']}  error {answer['error']:.2f}  "
                f"attend {1e3 * answer['attend']:.3g} ms  {answer['gflops']:.0f} GFLOP/s  "
                f"write_kv {1e3 * answer['write_kv']:.3g} ms"
            )
        for name in ("version", "threads", "isa"):
            values = list(dict.fromkeys(str(answer[name]) for answer in self.ranks))
            if len(values) > 1:
                yield f"note: ranks differ in {name}: {', '.join(values)}"
        if self.network:
            slowest = min(self.ranks, key=lambda answer: answer["gflops"])
            rates = {"gflops": slowest["gflops"], "threads": slowest["threads"], **self.network}
            yield f"rates: {as_options(rates)}"
        size = len(self.ranks)
        new, cached = (size * self.options[name] for name in ("tokens", "cached"))
        times = ", ".join(
            f"{name} {_milliseconds(seconds)}" for name, seconds in self.exchanges.items()
        )
        yield f"a layer of {new} new tokens behind {cached}: {times}"
        yield f"fastest where pools are shared out: {self.fastest}"
        yield (
            f"{'passed' if self.passed else 'FAILED'}: cp_size {size}, "
            f"{', '.join((*STRATEGIES, *PLACEMENTS, *ON_ALL_RANKS))}, {self.options['dtype']}; "
            "errors up to 1 are roundings"
        )


def _milliseconds(seconds: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(1e3 * seconds)))
    return f"{1e3 * seconds:.{digits}f} ms"
