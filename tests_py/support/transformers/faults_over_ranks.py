# SPDX-License-Identifier: Apache-2.0
"""Model over ranks; one of them dies, stops, is late or fails in the middle of a pass."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist

from cpattn.integrations.transformers import ContextParallelModel
from support.distributed.distributed_worker import error_of
from support.transformers.over_ranks import GREEDY, PROMPTS, engine_of, fail
from support.transformers.tiny_transformers import make_model

Case = tuple[str, str]
TIMEOUT = 5.0  # seconds until a group gives up
CULPRIT = 1
#: Faults and placements: a lost rank ends its group; a rank with an OWN error keeps it.
LOSSES = (("late", "replicated"), ("stop", "page_interleave"))
OWN = (
    ("model", "replicated"), ("model", "page_interleave"), ("processor", "shared"),
    ("streamer", "shared"), ("plan", "replicated"), ("write_kv", "page_interleave"),
)  # fmt: skip
DEATH = ("die", "page_interleave")


class Told(NamedTuple):
    error: str
    seconds: float
    requests: int
    cached_pages: int
    again: list[list[int]] | None  # tokens of the next call, if one is possible


def late() -> None:
    time.sleep(TIMEOUT + 3)


def stop() -> None:
    pid = os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT + 3}; kill -CONT {pid}"]):
        os.kill(pid, signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {
    "late": late, "stop": stop, "model": fail, "die": lambda: os._exit(1),
}  # fmt: skip


class Failing:
    put = end = fail


def generate(engine: ContextParallelModel, fault: str, is_culprit: bool) -> list[list[int]]:
    """Generate tokens behind several prompts, in chunks; the fault is in the third MLP."""
    if fault == "processor":  # the rank with the last token of the prompt calls it
        return engine.generate(PROMPTS[:1], **GREEDY, logits_processor=[fail])
    if fault == "streamer":
        return engine.generate(PROMPTS[:1], **GREEDY, streamer=Failing() if is_culprit else None)
    if fault in ("plan", "write_kv"):
        call = fail if is_culprit else getattr(engine.cp, fault)
        with patch.object(engine.cp, fault, call):
            return engine.generate(PROMPTS[:4], **GREEDY)
    calls = iter(range(1 << 30))

    def hook(*arguments: Any) -> None:
        if is_culprit and next(calls) == 2:
            FAULTS[fault]()

    hooks = [layer.mlp.register_forward_pre_hook(hook) for layer in engine.model.model.layers]
    try:
        return engine.generate(PROMPTS[:4], **GREEDY)
    finally:
        for one in hooks:
            one.remove()


def run_faults(rank: int, cases: Sequence[Case]) -> dict[Case, Told]:
    """Run faults, each in a new group."""
    model, found = make_model("llama"), {}
    for case in cases:
        fault, placement = case
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
        engine = engine_of(model, group=group, placement=placement, token_budget=24)
        engine.generate(PROMPTS[4:], **GREEDY)  # these prompts stay in the pools
        error, seconds = error_of(lambda: generate(engine, fault, rank == CULPRIT))  # noqa: B023
        again, kept = None, engine.cache.num_idle_pages
        if case in OWN:
            again = engine.generate(PROMPTS, **GREEDY)
        found[case] = Told(error, seconds, len(engine.progress()), kept, again)
    return found
