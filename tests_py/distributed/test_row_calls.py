# SPDX-License-Identifier: Apache-2.0
"""Rows of some tokens, and values that ranks compare."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from support.distributed.distributed_worker import error_of, run_world

EXTENDS = [5, 1, 9]
LAST = np.cumsum(EXTENDS) - 1


def program(rank):
    found = {}
    cp = ContextParallel(dist.group.WORLD, page_size=4)
    plan = cp.plan(EXTENDS, block_tables=[[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    x = cp.shard(plan, torch.arange(15.0)[:, None] * torch.ones(3))
    is_last = torch.zeros(15, dtype=torch.bool)
    is_last[LAST] = True
    own = x[cp.shard(plan, is_last)]
    found["last"] = cp.gather(plan, own, tokens=LAST[::-1].copy())[:, 0].tolist()
    found["none"] = list(cp.gather(plan, own[:0], tokens=[]).shape)
    found["by columns"] = cp.gather(plan, own.T.contiguous(), 1, tokens=LAST)[0].tolist()

    def gather(tokens):
        return error_of(lambda: cp.gather(plan, own, tokens=tokens))[0]

    def agree(**values):
        with cp.agreement() as mine:
            mine.update(values)

    def fail():
        with cp.agreement():
            if rank:
                raise ValueError("a prompt is too long")

    found["other tokens"] = gather(LAST if rank else LAST[:2])
    found["twice"] = gather([1, 1])
    found["beyond"] = gather([15])
    agree(model="a", prompts=(1, 2))
    found["values"] = error_of(lambda: agree(model="a", prompts=(1, rank)))[0]
    found["names"] = error_of(lambda: agree(**{"x" if rank else "y": 1}))[0]
    found["refused"] = error_of(fail)[0]
    agree()
    return found


def test_rows_of_some_tokens_and_values_that_differ(tmp_path):
    for rank, found in enumerate(run_world(2, tmp_path, program)):
        assert found["last"] == LAST[::-1].tolist()
        assert found["by columns"] == LAST.tolist()
        assert found["none"] == [0, 3]
        differs = "of rank 1 differs from rank 0; nothing was sent"
        assert found["other tokens"].endswith(f"gather: options {differs}")
        assert "tokens must be given once each" in found["twice"]
        assert "tokens must be in [0, 15), got 15 to 15" in found["beyond"]
        assert found["values"].endswith(f"agreement: prompts {differs}")
        assert found["names"].endswith(f"agreement: options {differs}")
        assert found["refused"].endswith("a prompt is too long")
        assert rank or "rank 1 refused its arguments" in found["refused"]
