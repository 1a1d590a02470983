# SPDX-License-Identifier: Apache-2.0
"""Decode steps by every way of exchanging partial results."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from support.distributed.sharded_worker import (
    PLACEMENTS,
    Step,
    noted_events,
    received_bytes,
    written_step,
)

STATE_EXCHANGES = ("gather", "all_to_all")
OUT_HEADS = ("all", "own")
QUERIES = ("all", "own")
WAYS = [("auto", "all", "all"), *itertools.product(STATE_EXCHANGES, OUT_HEADS, QUERIES)]
Way = tuple[str, str, str]


def run_ways(
    rank: int, runs: list[tuple[Step, str]]
) -> dict[tuple[Step, str], dict[Way, list[torch.Tensor]]]:
    """out and lse of steps over placements, by every way; and the heads of this rank."""
    results = {}
    for step, placement in runs:
        cp, plan, every_head, shards = written_step(rank, step, placement)
        heads = cp.head_range(step.num_heads)
        own = {name: x if name == "k_rope" else x[:, heads] for name, x in every_head.items()}
        options = step.attend_options() | {"v_head_dim": 32 if step.latent else None}
        results[step, placement] = {
            (exchange, out_heads, queries): cp.decode(
                plan,
                k_shard=shards[0],
                v_shard=shards[1],
                **(every_head if queries == "all" else own),
                num_heads=None if queries == "all" else step.num_heads,
                exchange=exchange,
                out_heads=out_heads,
                return_lse=True,
                **options,
            )
            for exchange, out_heads, queries in WAYS
        }
    return results


def run_received(rank: int, step: Step) -> dict[tuple[str, str], tuple[int, int, int, str]]:
    """By each way: bytes that came in, those of the choice, rounds, and what "auto" takes."""
    cp, plan, inputs, shards = written_step(rank, step, "pages")
    answer = {}
    for exchange, out_heads in itertools.product(STATE_EXCHANGES, OUT_HEADS):
        with noted_events(cp, "decode") as events:
            cp.decode(plan, inputs["q"], *shards, exchange=exchange, out_heads=out_heads)
        choice = cp.choose_exchange(
            plan, num_heads=step.num_heads, num_kv_heads=step.num_kv_heads, head_dim=48,
            v_head_dim=32, element_bytes=inputs["q"].element_size(), out_heads=out_heads,
        )  # fmt: skip
        answer[exchange, out_heads] = (
            received_bytes(events, "decode"), choice.received_bytes[exchange],
            [event.kind for event in events].count("post"), choice.exchange,
        )  # fmt: skip
    return answer


def run_disagreements(rank: int) -> dict[str, str]:
    """What each rank is told if rank 1 does something else."""
    size = dist.get_world_size()
    cp = ContextParallel(dist.group.WORLD, page_size=4, placement=PLACEMENTS["pages"](size, 4))
    plan = cp.plan_decode([3, 9], block_tables=[[1, -1, -1], [4, 5, 6]])
    shards = [torch.zeros(64, 2, 32) for _ in "kv"]
    q = torch.zeros(2, 4, 32)
    changes: dict[str, dict[str, Any]] = {
        "exchange": {"exchange": "gather"},
        "out_heads": {"out_heads": "own"},
        "num_heads": {"num_heads": 4},
        "unknown": {"exchange": "ring"},
    }
    told = {}
    for name, change in changes.items():
        asked = change if rank == 1 else {"exchange": "all_to_all"} if name == "exchange" else {}
        queries = q[:, cp.head_range(4)] if "num_heads" in asked else q
        try:
            cp.decode(plan, queries, *shards, **asked)
        except (RuntimeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    told["at last"] = str(list(cp.decode(plan, q, *shards).shape))
    return told
