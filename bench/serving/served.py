# SPDX-License-Identifier: Apache-2.0
"""Kept results of a load that two servers, or engines, took in turns."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Protocol

from bench.harness.figures import Row
from bench.harness.sampling import spread
from bench.serving.load import Load
from bench.serving.report import ninetieth


class Turn(Protocol):
    """One load, in seconds."""

    @property
    def wall(self) -> float: ...
    @property
    def first(self) -> list[float]:
        """The time of each request to its first token."""
        ...


def about(arguments: argparse.Namespace, work: Load) -> Row:
    """Describe the differences between a load and the recorded trace."""
    return {
        "requests": len(work.prompts),
        "lengths_divided_by": arguments.scale_lengths,
        "trace": Path(arguments.trace).name if arguments.trace else "generated",
        "random": "weights, and tokens; prompts that share a prefix in the trace share one here",
    }


def rows_of(
    workload: str, work: Load, turns: Mapping[str, Sequence[Turn]], threads: int, about: Row
) -> list[Row]:
    """Rows in the harness's form, the last server's first, with first tokens of all turns."""
    rows = []
    for name in reversed([*turns]):
        walls = [turn.wall for turn in turns[name]]
        first = [seconds for turn in turns[name] for seconds in turn.first]
        row = {
            "part": "trace",
            "case": {"workload": workload, "threads": threads},
            "implementation": name,
            "status": "ok",
            "median": median(walls),
            "minimum": min(walls),
            "spread": spread(walls),
            "samples": len(walls),
            "dropped": 0,
            "error": 0.0,  # lengths of answers are checked, tokens are where steps are measured
            "ns_per_item": 1e9 * median(walls) / work.prompt_tokens,
            "item": "prompt token",
            "first_token_median": median(first),
            "first_token_90_percent": ninetieth(first),
            "prompt_tokens_per_second": work.prompt_tokens / median(walls),
            "output_tokens_per_second": sum(work.output_lengths) / median(walls),
        }
        rows.append(row | about)
    return rows
