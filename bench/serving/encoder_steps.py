# SPDX-License-Identifier: Apache-2.0
"""Encoders of BERT's size in vLLM, with its own attention and with cpattn's: vectors and scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.harness import accuracy
from bench.harness.contender import Contender, Failed
from bench.harness.figures import Row
from bench.serving import steps
from bench.serving.turns import BACKENDS, ENVIRONMENT
from bench.serving.vllm_steps import SAME

TASKS = {"embed": "embedding", "classify": "cross-encoder"}
#: Rounds of what takes long.
FEW_ROUNDS, LONG = 5, 4096


@dataclass(frozen=True)
class Case:
    """A prompt of `length` tokens; `bench.serving.model` writes the model."""

    model: str
    task: str
    length: int
    bar: float | None = None  # times as fast as vLLM's own attention

    @property
    def name(self) -> str:
        return f"{TASKS[self.task]} of {self.length}, {self.model}"

    @property
    def tokens(self) -> int:
        return self.length


CASES = tuple(
    Case(model, task, length, bar=SAME)
    for model, length in (("BERT", 512), ("ModernBERT", 512), ("ModernBERT", 8192))
    for task in TASKS
)
QUICK_CASES = tuple(
    Case(model, task, length)
    for model, length in (("BERT", 96), ("ModernBERT", 300))
    for task in TASKS
)


class Engine(Contender):
    """A child process with an encoder in vLLM, with one of the backends."""

    def __init__(self, backend: str, num_threads: int, *arguments: object) -> None:
        command = [sys.executable, "-m", "bench.serving.encoder_engine", backend]
        plugins = "1" if backend == "cpattn" else "0"
        variables = {"CPATTN_NUM_THREADS": str(num_threads), "CPATTN_PLUGINS": plugins}
        command += map(str, arguments)
        super().__init__(BACKENDS[backend], command, num_threads, ENVIRONMENT | variables)


def measure(engines: Sequence[Contender], case: Case, rounds: int, threads: int) -> list[Row]:
    """The rows of a case, cpattn's first; Failed if an engine is, or if their results differ."""
    theirs, ours = (engine.ask("pool", length=case.length)["pooled"] for engine in engines)
    error = difference(theirs, ours)
    rounds = min(rounds, FEW_ROUNDS) if case.length > LONG else rounds
    return steps.in_turns(
        engines, case, rounds, threads, "pool", {"length": case.length}, error, part="encoders"
    )


def difference(expected: Sequence[float], found: Sequence[float]) -> float:
    """Return the relative error of a vector; refuse more than rounding."""
    right, off = np.array(expected), np.subtract(found, expected)
    share = float(np.linalg.norm(off) / np.linalg.norm(right))
    if not share <= accuracy.TRANSFORMERS["model"]:
        raise Failed("wrong", f"what a prompt becomes is {share:.2g} of its length off")
    return share
