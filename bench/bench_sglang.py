# SPDX-License-Identifier: Apache-2.0
"""Metadata of one forward pass of sglang: its own builders, and the plug-in called in their place.

Needs sglang 0.5.23 (docs/sglang.md); without it there is nothing to compare with. Both make
sglang's objects, tensors on the CPU included, and ours is called through sglang's hooks, as the
engine calls it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cpattn import torch_guard
from harness import Suite

if message := torch_guard.prepare():
    print(message)
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests_py"))  # whose means of comparison it uses
import sglang_planning
from cpattn.integrations import sglang as plugin

CP_SIZE, CP_RANK = 8, 1
BATCHES = (1, 8, 64, 256, 1024)
BARS = {("zigzag", 1): 3.0, ("zigzag", 256): 10.0}


def make_batch(bs: int) -> tuple[int, list[int], list[int]]:
    rng = random.Random(bs)
    extend_lens = [rng.randrange(2 * CP_SIZE, 4096) for _ in range(bs)]
    return (
        sum(extend_lens),
        [n + rng.choice([0, rng.randrange(4096)]) for n in extend_lens],
        extend_lens,
    )


def builders() -> dict[str, dict[str, Callable[..., Any]]]:
    """By strategy: cpattn's, through sglang's hooks, and sglang's own, taken before them."""
    sglang = sglang_planning.load()
    classes = (sglang.zigzag.ZigzagCPStrategy, sglang.interleave.InterleaveCPStrategy)
    strategies = [type("OfRank", (base,), {"cp_rank": CP_RANK})(CP_SIZE) for base in classes]
    own = {strategy.name: strategy.build_metadata for strategy in strategies}
    plugin.install("metadata")
    return {
        strategy.name: {"cpattn": strategy.build_metadata, "sglang": own[strategy.name]}
        for strategy in strategies
    }


def main() -> int:
    suite = Suite("sglang", f"Metadata of one rank of {CP_SIZE}, as sglang's objects")
    if find_spec("sglang") is None:
        print("bench_sglang: sglang is not installed, there is nothing to compare with")
        return 0
    torch.set_num_threads(1)
    for strategy, implementations in builders().items():
        for bs in suite.cases(BATCHES, quick=(1, 8)):
            case = {"strategy": strategy, "batch": bs}
            suite.compare(
                case,
                implementations,
                partial(make_batch, bs),
                assert_same=sglang_planning.assert_same,
                bar=BARS.get((strategy, bs)),
            )
    return suite.finish()


if __name__ == "__main__":
    raise SystemExit(main())
