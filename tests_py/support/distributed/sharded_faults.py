# SPDX-License-Identifier: Apache-2.0
"""Ranks with sharded pools that disagree, or are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import ring
from support.distributed.distributed_worker import make_plan
from support.distributed.prefill_batches import Case, make_batch
from support.distributed.sharded_worker import PLACEMENTS, Run, run_prefill

SMALL = Case("small", (5, 13), (4, 0))
ODD_RANK = 1


def run_disagreements(rank: int) -> tuple[dict[str, str], bool]:
    """What each rank is told if rank 1 does something else, and whether a batch works then."""
    size, is_odd = dist.get_world_size(), rank == ODD_RANK
    batch = make_batch(SMALL)

    def parts(
        usual: str = "pass_q", **changes: Any
    ) -> tuple[ContextParallel, Any, torch.Tensor, list[torch.Tensor]]:
        options = {
            "page_size": SMALL.page_size,
            "placement": PLACEMENTS["pages"](size, SMALL.page_size),
            "exchange": usual,
        }
        cp = ContextParallel(dist.group.WORLD, **options | (changes if is_odd else {}))
        plan = make_plan(cp, SMALL, batch)
        shards = [torch.zeros(64, 2, 32) for _ in "kv"]
        return cp, plan, cp.shard(plan, batch.q), shards

    def attend(changes: dict[str, Any], usual: str = "pass_q", **options: Any) -> None:
        cp, plan, q, shards = parts(usual, **changes)
        cp.attend(plan, q, *shards, **(options if is_odd else {}))

    def scaled(exchange: str) -> None:
        cp, plan, q, _ = parts(exchange)
        codes = torch.ones(64, 2, 32, dtype=torch.int8)
        scales = torch.tensor([0.5, 0.25 if is_odd else 0.5])
        cp.attend(plan, q, codes, codes, v_scale=scales)

    def scaled_by_tokens() -> None:
        cp, plan, q, _ = parts()
        codes = torch.ones(64, 2, 32, dtype=torch.int8)
        cp.attend(plan, q, codes, codes, v_scale=torch.ones(64, 2) if is_odd else torch.ones(2))

    def write(**changes: Any) -> None:
        cp, plan, _, shards = parts(**changes)
        rows = torch.zeros(plan.num_local_rows, 2, 32)
        cp.write_kv(plan, rows, rows, *shards)

    def decode(step: dict[str, Any], **options: Any) -> None:
        cp, _, _, shards = parts()
        lens = {"kv_lens": [3, 9], "block_tables": [[1, -1, -1], [4, 5, 6]]}
        plan = cp.plan_decode(**lens | (step if is_odd else {}))
        cp.decode(plan, torch.zeros(2, 4, 32), *shards, **(options if is_odd else {}))

    def sparse(**options: Any) -> None:
        cp, plan, _, _ = parts()
        rows = plan.num_local_rows
        cp.attend_sparse(
            plan, torch.zeros(rows, 2, 32), torch.zeros(64, 1, 32), torch.zeros(rows, 1, 16),
            torch.zeros(64, 1, 16), torch.zeros(rows, 1),
            **{"topk": 4, "sm_scale": 1.0, "d_v": 16} | (options if is_odd else {}),
        )  # fmt: skip

    def refused() -> None:
        cp, plan, q, shards = parts()
        cp.attend(plan, q, *[shard[:4] if is_odd else shard for shard in shards])

    def other_call() -> None:
        cp, plan, q, shards = parts()
        if is_odd:
            rows = torch.zeros(plan.num_local_rows, 2, 32)
            cp.write_kv(plan, rows, rows, *shards)
        else:
            cp.attend(plan, q, *shards)

    tokens = PLACEMENTS["tokens"](size, SMALL.page_size)
    attempts: dict[str, Callable[[], None]] = {
        "placement": lambda: write(placement=tokens),
        "placement of attend": lambda: attend({"placement": tokens}),
        "replicated": lambda: write(placement=None),
        "exchange": lambda: attend({"exchange": "gather"}),
        "max_scratch_bytes": lambda: attend({"max_scratch_bytes": 1}),
        "window": lambda: attend({}, window=3),
        "scale": lambda: attend({}, scale=0.5),
        "sinks": lambda: attend({}, sinks=torch.ones(4)),
        "LSE by heads": lambda: attend({}, "all_to_all", return_lse=True),
        **{f"scales by {name}": partial(scaled, name) for name in ("gather", "ring", "all_to_all")},
        "scales of tokens": scaled_by_tokens,
        "topk": lambda: sparse(topk=3),
        "sink": lambda: sparse(attn_sink=torch.zeros(2)),
        "kv_lens": lambda: decode({"kv_lens": [4, 9]}),
        "softcap of decode": lambda: decode({}, softcap=1.0),
        "call": other_call,
        "small shard": refused,
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (RuntimeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    answer = run_prefill(Run(SMALL, "pages", "pass_q"))
    return told, answer["shards"]


def run_loss(rank: int, exchange: str, group: Any = None) -> str:
    """What the others are told if the last rank leaves after all have agreed."""
    case = SMALL
    batch, size = make_batch(case), dist.get_world_size()
    cp = ContextParallel(
        dist.group.WORLD if group is None else group,
        page_size=case.page_size,
        placement=PLACEMENTS["pages"](size, case.page_size),
        exchange=exchange,
    )
    plan = make_plan(cp, case, batch)
    shards = [torch.zeros(64, 2, 32) for _ in "kv"]
    if rank == size - 1:
        cp._exchange.post = leave_after_agreement(cp._exchange.post)
    try:
        cp.attend(plan, cp.shard(plan, batch.q), *shards)
    except RuntimeError as error:
        return str(error)
    return "no error"


def run_early_end(rank: int) -> str:
    """What ranks are told of rank 0, which ends well while rank 3 still waits for keys of rank 2.

    They pass keys round, and rank 2 computes longer than anybody waits for one that has died.
    """
    size, seconds = dist.get_world_size(), 1.0
    batch = make_batch(SMALL)
    cp = ContextParallel(
        dist.group.WORLD, page_size=SMALL.page_size, exchange="ring",
        placement=PLACEMENTS["pages"](size, SMALL.page_size),
    )  # fmt: skip
    assert cp.topology().transport == "shm"
    plan = make_plan(cp, SMALL, batch)
    shards = [torch.zeros(64, 2, 32) for _ in "kv"]
    attend_part = ring.attend_part

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds if rank == 2 else 0)
        return attend_part(*arguments, **options)

    try:
        with mock.patch.object(ring, "attend_part", slowly):
            cp.attend(plan, cp.shard(plan, batch.q), *shards)
    except RuntimeError as error:
        return str(error)
    if rank == 0:
        os._exit(0)
    return "no error"


def leave_after_agreement(post: Callable[..., Any], at: str = "") -> Callable[..., Any]:
    """Sends what ranks agree on, and ends the process at the first rows, or those of a call."""

    def send(call: str, *arguments: Any) -> Any:
        if "agreement" not in call and at in call:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(call, *arguments)

    return send
