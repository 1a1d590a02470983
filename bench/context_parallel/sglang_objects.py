# SPDX-License-Identifier: Apache-2.0
"""Metadata of one forward pass of sglang: its own builders, and the plug-in called in their place.

The two make sglang's objects, tensors on the CPU included, and ours is called through sglang's
hooks, like in the engine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.harness.comparison import Comparison, equal, times_as_fast
from cpattn.integrations import sglang as plugin

sys.path.append(str(Path(__file__).parents[2] / "tests_py"))  # whose means of comparison it uses
from support.sglang import sglang_planning

CP_SIZE, CP_RANK = 8, 1
BATCHES, QUICK_BATCHES = (1, 8, 64, 256, 1024), (1, 8)
OURS, PEER = "cpattn", "sglang"
BARS = {("zigzag", 1): 3.0, ("zigzag", 256): 10.0}


def comparisons(quick: bool) -> Iterator[Comparison]:
    for strategy, implementations in builders().items():
        for bs in QUICK_BATCHES if quick else BATCHES:
            yield of_batch(strategy, implementations, bs)


def of_batch(strategy: str, implementations: dict[str, Callable[..., Any]], bs: int) -> Comparison:
    rng = random.Random(bs)
    extend_lens = [rng.randrange(2 * CP_SIZE, 4096) for _ in range(bs)]
    seq_lens = [n + rng.choice([0, rng.randrange(4096)]) for n in extend_lens]

    def call(build: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: build(sum(extend_lens), seq_lens, extend_lens)

    calls = {name: call(build) for name, build in implementations.items()}
    at_least = BARS.get((strategy, bs))
    return Comparison(
        "sglang",
        {"strategy": strategy, "batch": bs},
        calls,
        equal(sglang_planning.assert_same, calls[PEER]()),
        work=None,
        items=(bs, "sequence"),
        bars=(times_as_fast(OURS, PEER, at_least, PEER),) if at_least else (),
    )


@cache
def builders() -> dict[str, dict[str, Callable[..., Any]]]:
    """Builders by strategy: cpattn's, through sglang's hooks, and sglang's, taken before."""
    sglang = sglang_planning.load()
    classes = (sglang.zigzag.ZigzagCPStrategy, sglang.interleave.InterleaveCPStrategy)
    strategies = [type("OfRank", (base,), {"cp_rank": CP_RANK})(CP_SIZE) for base in classes]
    own = {strategy.name: strategy.build_metadata for strategy in strategies}
    plugin.install("metadata")
    return {
        strategy.name: {OURS: strategy.build_metadata, PEER: own[strategy.name]}
        for strategy in strategies
    }
