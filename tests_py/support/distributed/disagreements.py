# SPDX-License-Identifier: Apache-2.0
"""Numbers that ranks tell each other, and errors if rank 1 differs from the other ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.transport import exchange as exchanges
from cpattn.distributed.transport import waiting
from cpattn.distributed.transport.exchange import RowExchange
from support.distributed.distributed_worker import error_of, make_plan
from support.distributed.prefill_batches import Case, make_batch
from support.distributed.sharded_worker import PLACEMENTS, Run, run_prefill
from support.time_limits import PATIENCE

SMALL = Case("small", (5, 13), (4, 0))
ODD_RANK = 1
Told = dict[str, str]  # error by the name of the difference


def is_usable() -> bool:
    return run_prefill(Run(SMALL, "pages", "pass_q"))["pools"]


def run_replicated(rank: int) -> tuple[Told, bool]:
    case, batch = SMALL, make_batch(SMALL)
    is_odd = rank == ODD_RANK
    cps = [ContextParallel(dist.group.WORLD, page_size=case.page_size)]

    def planned(**changes: Any) -> Any:
        return make_plan(cps[0], case, batch, **(changes if is_odd else {}))

    def write_kv(plan: Any, **pools: torch.Tensor) -> None:
        k, v = (cps[0].shard(plan, torch.zeros(plan.num_tokens, 2, 32)) for _ in "kv")
        pools = {"k_cache": batch.k_cache, "v_cache": batch.v_cache} | pools
        cps[0].write_kv(plan, k, v, **pools)

    def with_plan(**changes: Any) -> None:
        write_kv(planned(**changes))

    def with_cp(**changes: Any) -> None:
        options = {"strategy": "zigzag", "page_size": case.page_size}
        cp = ContextParallel(dist.group.WORLD, **(options | (changes if is_odd else {})))
        cp.gather(make_plan(cp, case, batch), torch.zeros(18, 8))

    def with_rows(rows: torch.Tensor) -> None:
        cps[0].gather(planned(), rows if is_odd else torch.zeros(18, 8))

    def with_call() -> None:
        with_rows(torch.zeros(18, 8)) if is_odd else write_kv(planned())

    def with_history() -> None:
        plan = planned()
        if is_odd:
            cps[0] = ContextParallel(dist.group.WORLD, page_size=case.page_size)
        write_kv(plan)

    other_tables = batch.block_tables.clone()
    other_tables[1, :2] = batch.block_tables[1, :2].flip(0)
    slots = make_plan(cps[0], case, batch).slots.copy()
    slots[3] = -1
    small = batch.k_cache[:4] if is_odd else batch.k_cache
    attempts = {
        "extend_lens": lambda: with_plan(extend_lens=[6, 12], seq_lens=[9, 13]),
        "prefix": lambda: with_plan(extend_lens=[5, 13], seq_lens=[8, 13]),
        "num_tokens": lambda: with_plan(num_tokens=20),
        "block_tables": lambda: with_plan(block_tables=other_tables),
        "slots": lambda: with_plan(out_cache_loc=slots),
        "mask": lambda: with_plan(custom_mask=torch.ones(5 * 9 + 13 * 13, dtype=torch.bool)),
        "strategy": lambda: with_cp(strategy="contiguous"),
        "page_size": lambda: with_cp(page_size=8),
        "weights": lambda: with_cp(weights=[1, *[2] * (dist.get_world_size() - 1)]),
        "whole_pages": lambda: with_cp(whole_pages=True),
        "dtype": lambda: with_rows(torch.zeros(18, 4, dtype=torch.float64)),
        "width": lambda: with_rows(torch.zeros(18, 7)),
        "call": with_call,
        "too few rows": lambda: with_rows(torch.zeros(2, 8)),
        "small pool": lambda: write_kv(planned(), k_cache=small),
        "history": with_history,
    }
    told = {name: error_of(attempt)[0] for name, attempt in attempts.items()}
    assert torch.equal(batch.k_cache.isnan(), make_batch(case).k_cache.isnan())
    return told, is_usable()


def run_sharded(rank: int) -> tuple[Told, bool]:
    size, is_odd = dist.get_world_size(), rank == ODD_RANK
    batch = make_batch(SMALL)
    codes = torch.ones(64, 2, 32, dtype=torch.int8)

    def parts(usual: str = "pass_q", **changes: Any) -> tuple[Any, Any, Any, list[torch.Tensor]]:
        options = {
            "page_size": SMALL.page_size,
            "placement": PLACEMENTS["pages"](size, SMALL.page_size),
            "exchange": usual,
        }
        cp = ContextParallel(dist.group.WORLD, **options | (changes if is_odd else {}))
        plan = make_plan(cp, SMALL, batch)
        return cp, plan, cp.shard(plan, batch.q), [torch.zeros(64, 2, 32) for _ in "kv"]

    def attend(changes: dict[str, Any], usual: str = "pass_q", **options: Any) -> None:
        cp, plan, q, shards = parts(usual, **changes)
        cp.attend(plan, q, *shards, **(options if is_odd else {}))

    def scaled(exchange: str, scales: torch.Tensor) -> None:
        cp, plan, q, _ = parts(exchange)
        usual = torch.tensor([0.5, 0.5])
        cp.attend(plan, q, codes, codes, k_scale=usual, v_scale=scales if is_odd else usual)

    def write(**changes: Any) -> None:
        cp, plan, _, shards = parts(**changes)
        rows = torch.zeros(plan.num_local_rows, 2, 32)
        cp.write_kv(plan, rows, rows, *shards)

    def decode(step: dict[str, Any], **options: Any) -> None:
        cp, _, _, shards = parts()
        lens = {"kv_lens": [3, 9], "block_tables": [[1, -1, -1], [4, 5, 6]]}
        plan = cp.plan_decode(**lens | (step if is_odd else {}))
        heads = cp.head_range(4) if is_odd and "num_heads" in options else slice(None)
        cp.decode(plan, torch.zeros(2, 4, 32)[:, heads], *shards, **(options if is_odd else {}))

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

    tokens = PLACEMENTS["tokens"](size, SMALL.page_size)
    other_scales = torch.tensor([0.5, 0.25])
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
        **{
            f"scales by {name}": partial(scaled, name, other_scales)
            for name in ("gather", "ring", "all_to_all")
        },
        "scales of tokens": lambda: scaled("pass_q", torch.ones(64, 2)),
        "topk": lambda: sparse(topk=3),
        "sink": lambda: sparse(attn_sink=torch.zeros(2)),
        "kv_lens": lambda: decode({"kv_lens": [4, 9]}),
        "softcap of decode": lambda: decode({}, softcap=1.0),
        "exchange of decode": lambda: decode({}, exchange="all_to_all"),
        "out_heads": lambda: decode({}, out_heads="own"),
        "num_heads": lambda: decode({}, num_heads=4),
        "unknown exchange": lambda: decode({}, exchange="ring"),
        "call of shards": lambda: write() if is_odd else attend({}),
        "small shard": refused,
    }
    return {name: error_of(attempt)[0] for name, attempt in attempts.items()}, is_usable()


def run_agreements(rank: int) -> list[dict[str, Any]]:
    """Return sent numbers and started threads: for timely and late messages, and beside rows."""
    exchange = RowExchange(dist.group.WORLD)
    with exchange.agreement("topology", (0,) * 6):  # versions
        pass
    return [_told(exchange, rank, case) for case in ("in time", "missed", "beside rows", "in time")]


def _told(exchange: RowExchange, rank: int, case: str) -> dict[str, Any]:
    begin = waiting.threading.Thread
    missed = (lambda ends: False) if case == "missed" else waiting.have_come
    with (
        mock.patch.object(waiting, "_PATIENT", PATIENCE),  # enough for a busy machine
        mock.patch.object(exchanges, "have_come", missed),
        mock.patch.object(waiting.threading, "Thread", side_effect=begin) as threads,
    ):
        if case == "beside rows":
            exchange.begin_ahead("attend", [1] * exchange.size, [torch.full((1, 4), rank)], 0)
        answers = [exchange.told(case, [rank, turn, 0]) for turn in range(5)]
        ahead = [column[:, 0].tolist() for column in exchange.end_ahead()]
    return {"told": answers, "threads": threads.call_count, "ahead": ahead}
