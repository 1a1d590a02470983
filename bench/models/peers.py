# SPDX-License-Identifier: Apache-2.0
"""Peers that share two cores: a process with two threads, or two ranks with one each."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import two_hosts
from bench.harness.contender import Contender

SDPA = "sdpa"
CORES = 2
ALONE = {"cpattn": "cpattn", SDPA: "sdpa"}


@dataclass(frozen=True)
class Ranks:
    """Ranks of an engine, their placement of keys, and the link between them if each has a host."""

    size: int
    placement: str = "replicated"
    link_gbps: float | None = None


ENGINES = {
    "cpattn engine, 1 rank": Ranks(1),
    "cpattn engine, 2 ranks": Ranks(2),
    "cpattn engine, 2 ranks with shares": Ranks(2, "page_interleave"),
    "cpattn engine, 2 hosts": Ranks(2, link_gbps=1.0),
}


class Peer(Contender):
    """A peer in its own processes, the first of which is asked."""

    answer_seconds = 1200.0

    def __init__(self, name: str, threads: int, **options: Any) -> None:
        given = json.dumps({"threads": threads} | options)
        variables = {"CPATTN_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "bench.models.process", given]
        super().__init__(name, command, threads, variables)


@dataclass(frozen=True)
class Sizes:
    """Lengths that are tried, and the sizes of the model."""

    long: int = 32768
    short: int = 8192
    new: int = 2048
    requests: int = 4
    steps: int = 16
    quick: bool = False

    @property
    def max_tokens(self) -> int:
        """Tokens that pools hold: the longest prompt, and cached ones beside it."""
        return self.long + self.short + 64 * 16


QUICK = Sizes(long=320, short=160, new=48, requests=2, steps=3, quick=True)


def fastest_dtype() -> str:
    """Return bfloat16, or float32 if torch, which has the weights, multiplies it faster."""
    return min(("bfloat16", "float32"), key=_seconds_of_products)


def _seconds_of_products(dtype: str) -> float:
    x = torch.ones(512, 1024, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        torch.nn.functional.linear(x, x)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def alone(folder: Path, dtype: str) -> list[Peer]:
    return [
        Peer(name, CORES, kind="alone", folder=str(folder), dtype=dtype, attention=attention)
        for name, attention in ALONE.items()
    ]


def engines(folder: Path, dtype: str, num_pages: int) -> Iterator[Peer]:
    """Start each engine when it is asked for."""
    for name, ranks in ENGINES.items():
        if can_be_started(name, ranks):
            yield Peer(
                name, CORES // ranks.size, kind="engine", folder=str(folder), dtype=dtype,
                num_pages=num_pages, **asdict(ranks),
            )  # fmt: skip


def can_be_started(name: str, ranks: Ranks) -> bool:
    """Whether the hosts that an engine needs can be made; prints the reason if not."""
    reason = two_hosts.why_not(ranks.link_gbps) if ranks.link_gbps else ""
    if reason:
        print(f"{name}: left out, {reason}")
    return not reason
