# SPDX-License-Identifier: Apache-2.0
"""Decode steps by every way of exchanging partial results."""

import itertools

from support.distributed.sharded_worker import Step, noted_events, received_bytes, written_step

STATE_EXCHANGES = ("gather", "all_to_all")
OUT_HEADS = ("all", "own")
QUERIES = ("all", "own")
WAYS = [("auto", "all", "all"), *itertools.product(STATE_EXCHANGES, OUT_HEADS, QUERIES)]


def run_all(rank: int, runs: list[tuple[Step, str]], traffic: Step) -> tuple[dict, dict]:
    return run_ways(rank, runs), run_received(rank, traffic)


def run_ways(rank: int, runs: list[tuple[Step, str]]) -> dict[tuple[Step, str], dict]:
    results = {}
    for step, placement in runs:
        cp, plan, every_head, shards = written_step(rank, step, placement)
        heads = cp.head_range(step.num_heads)
        own = {name: x if name == "k_rope" else x[:, heads] for name, x in every_head.items()}
        options = {
            "k_shard": shards[0], "v_shard": shards[1], "return_lse": True,
            "v_head_dim": 32 if step.latent else None, **step.attend_options(),
        }  # fmt: skip
        own["num_heads"] = step.num_heads
        ways = {}
        for exchange, out_heads, queries in WAYS:
            rows = every_head if queries == "all" else own
            how = {"exchange": exchange, "out_heads": out_heads}
            ways[exchange, out_heads, queries] = cp.decode(plan, **rows, **how, **options)
        results[step, placement] = ways
    return results


def run_received(rank: int, step: Step) -> dict[tuple[str, str], tuple[int, int, int, str]]:
    """Return by way: bytes received, those of the choice, rounds, and what "auto" takes."""
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
