# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ, or one that refuses: all get an error and nothing is sent, except for rows."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from support.distributed import disagreements as worker
from support.distributed.distributed_worker import error_of, run_world


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the errors of each rank, over whole pools and over shares."""
    found = [{} for _ in range(3)]
    for program in (worker.run_replicated, worker.run_sharded):
        ranks = run_world(3, tmp_path_factory.mktemp("world"), program)
        for told, (more, usable) in zip(found, ranks, strict=True):
            assert usable  # the group still works after disagreements
            told |= more
    return found


@pytest.mark.parametrize(
    ("what", "term"),
    [
        *((name, ": lengths") for name in ("extend_lens", "prefix", "num_tokens")),
        *((name, f": {name}") for name in ("block_tables", "slots", "mask")),
        *(
            (name, ": strategy and page_size")
            for name in ("strategy", "page_size", "weights", "whole_pages")
        ),
        *((name, ": rows") for name in ("dtype", "width")),
        ("call", ": call"),
        ("history", ": sequence"),
        ("placement", "write_kv: placement"),
        ("placement of attend", "attend: placement"),
        ("replicated", "write_kv: placement"),
        *((name, "attend: exchange") for name in ("exchange", "max_scratch_bytes")),
        *((name, "attend: options") for name in ("window", "scale", "sinks", "LSE by heads")),
        *((f"scales by {name}", "attend: options") for name in ("gather", "ring", "all_to_all")),
        ("scales of tokens", "attend: options"),
        *((name, "attend_sparse: options") for name in ("topk", "sink")),
        ("kv_lens", "decode: lengths"),
        ("softcap of decode", "decode: options"),
        *((x, "decode: exchange") for x in ("exchange of decode", "out_heads", "num_heads")),
        ("call of shards", ": call"),
    ],
)
def test_disagreement_is_told_to_all_ranks_before_rows_are_sent(answers, what, term):
    for told in answers:
        message = told[what]
        assert message.startswith("RuntimeError: ContextParallel.")
        assert f"{term} of rank 1 differs from rank 0" in message
        assert message.endswith("; nothing was sent")
        assert what != "call" or "(rank 0 calls write_kv, rank 1 calls gather)" in message
        assert what != "history" or re.search(r"\(rank 0 makes call \d+, rank 1 makes", message)


@pytest.mark.parametrize(
    ("what", "own"),
    [
        ("too few rows", "gather: x_local must have at least the 6 rows of rank 1, got 2"),
        ("small pool", "write_kv: slots must be below the 4 rows of k_cache, got "),
        ("small shard", "attend: the shard of rank 1"),
        ("unknown exchange", "decode: exchange must be one of"),
    ],
)
def test_refused_arguments_of_one_rank_are_told_to_all(answers, what, own):
    for rank, told in enumerate(answers):
        message = told[what]
        if rank == worker.ODD_RANK:
            assert f"ValueError: ContextParallel.{own}" in message
        else:
            refused = "rank 1 refused its arguments; nothing was sent: ValueError: ContextParallel."
            assert f"{refused}{own}" in message
            assert len(message.partition("was sent: ")[2].encode()) <= 256


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
    found["kinds"] = error_of(lambda: agree(x=True if rank else 1))[0]
    for name in ("call", "sequence"):
        found[name] = error_of(lambda name=name: agree(**{name: rank}))[0]
    cp.topology()  # from now on the ranks agree in the memory that they share
    many = {f"value {i}": i for i in range(70)}
    agree(**many)
    found["value 65"] = error_of(lambda: agree(**many | {"value 65": rank}))[0]
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
        for name in ("call", "sequence", "value 65"):
            assert found[name].endswith(f"agreement: {name} {differs}")
        assert found["kinds"].endswith(f"agreement: x {differs}")
        assert found["refused"].endswith("a prompt is too long")
        assert rank or "rank 1 refused its arguments" in found["refused"]
