# SPDX-License-Identifier: Apache-2.0
"""Prefills and decode steps on the ranks of a group, with whole or sharded pools."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import ring, rounds
from cpattn.kv import PageInterleave, TokenInterleave
from support.distributed.distributed_worker import make_plan
from support.distributed.prefill_batches import Case, make_batch, slots_of

EXCHANGES = ("gather", "ring", "pass_q", "all_to_all")
# Functions of the number of ranks and the page size, by name.
PLACEMENTS: dict[str, Callable[[int, int], Any]] = {
    "pages": lambda size, page: PageInterleave(shard_size=size, page_size=page),
    "tokens": lambda size, page: TokenInterleave(shard_size=size, interleave=1),
    "halves of pages": lambda size, page: TokenInterleave(shard_size=size, interleave=page // 2),
}
# Settings for as many rounds as KV heads.
ROUNDS = {"_LEAST_BYTES": 1, "_MOST_FLOPS_PER_BYTE": 1 << 60}


@dataclass(frozen=True)
class Run:
    case: Case
    placement: str
    exchange: str

    def __str__(self) -> str:
        return f"{self.exchange}, {self.placement}, {self.case.strategy}, {self.case.name}"


def unread(x: torch.Tensor) -> Any:
    """Return the content of places that no call may read."""
    return torch.nan if x.is_floating_point() else 77


def shard_of(placement: Any, rank: int, pool: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return a rank's part of a whole pool."""
    slots = np.arange(len(pool))
    mine = placement.owner_of(slots) == rank
    rows = placement.local_index(slots)
    num_rows = -(-(int(rows.max()) + 1) // page_size) * page_size
    shard = pool.new_full((num_rows, *pool.shape[1:]), unread(pool))
    shard[rows[mine]] = pool[slots[mine]]
    return shard


def equal(some: Any, others: Any) -> bool:
    """Return whether tensors are equal one by one; NaN equals NaN."""
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(some, others, strict=True)
    )


def run_prefill(run: Run, group: Any = None) -> dict[str, Any]:
    """Return results over shards and over whole pools, and whether pools are correct."""
    case, batch = run.case, make_batch(run.case)
    options = {"strategy": case.strategy, "page_size": case.page_size}
    whole = ContextParallel(group or dist.group.WORLD, **options)
    placement, rank = PLACEMENTS[run.placement](whole.cp_size, case.page_size), whole.cp_rank
    cp = ContextParallel(
        group or dist.group.WORLD, placement=placement, exchange=run.exchange, **options
    )
    plan, replicated = make_plan(cp, case, batch), make_plan(whole, case, batch)
    rows = (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    q, k, v = (cp.shard(plan, x) for x in rows)
    for x in (q, k, v):  # rows of physical padding may have any values
        x[plan.num_local_rows :] = torch.nan
    caches = batch.k_cache, batch.v_cache
    shards = [shard_of(placement, rank, pool, case.page_size) for pool in caches]
    cp.write_kv(plan, k, v, *shards)
    results = cp.attend(plan, q, *shards, return_lse=True)
    strided = q[:1, :1, :1].expand_as(q)  # its flat rows have a stride of 0 between columns
    of_strides = [cp.attend(plan, x, *shards) for x in (strided, strided.clone())]
    written = [cache.clone() for cache in caches]
    for pool, new in zip(written, (batch.k, batch.v), strict=True):
        for s, n in enumerate(case.seq_lens):
            pool[slots_of(batch.block_tables, s, n, case.page_size)] = new[s]
    whole.write_kv(replicated, k, v, *caches)
    expected = whole.attend(replicated, q, *caches, return_lse=True)
    of_strides += [whole.attend(replicated, x, *caches) for x in (strided, strided.clone())]
    real = slice(0, sum(case.extend_lens))
    out, lse, whole_out, whole_lse = (cp.gather(plan, x) for x in (*results, *expected))
    mine = [shard_of(placement, rank, pool, case.page_size) for pool in written]
    positions = torch.arange(plan.num_tokens).repeat(2, 1)
    return {
        "sharded": (out[real], lse[real]),
        "replicated": (whole_out[real], whole_lse[real]),
        "padding": [x[plan.num_local_rows :] for x in (results[0], expected[0])],
        "pools": equal(shards, mine) and equal(caches, written),
        "strides": equal(of_strides[::2], of_strides[1::2]),
        "positions": torch.equal(cp.gather(plan, cp.shard(plan, positions, -1), -1), positions),
        "kv_counts": plan.kv_counts,
        "rows_per_rank": plan.rows_per_rank,
        "num_rows": len(q),
    }


def run_prefills(
    rank: int, runs: list[Run], make_group: Callable[[], Any] = lambda: None
) -> dict[Run, dict[str, Any]]:
    group = make_group()
    return {run: run_prefill(run, group) for run in runs}


@dataclass(frozen=True)
class Step:
    """Decode step of requests with these numbers of keys; the last keys are new."""

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int = 8
    num_heads: int = 6
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    latent: bool = False
    masked: bool = False
    rope_apart: bool = False  # whether the last 16 of 48 dimensions of keys are separate
    options: tuple[tuple[str, Any], ...] = ()

    def attend_options(self) -> dict[str, Any]:
        of_heads = {
            "sinks": torch.linspace(-1, 2, self.num_heads),
            "alibi_slopes": torch.linspace(0.1, 1, self.num_heads),
            "bias": self.bias(),
        }
        return {name: of_heads.get(name, value) for name, value in self.options}

    def bias(self) -> torch.Tensor:
        """Make a bias; the last query of a request sees only its first page."""
        shape = len(self.q_lens), self.num_heads, max(self.q_lens), max(self.kv_lens)
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        for of_request, n in zip(numbers, self.q_lens, strict=True):
            of_request[:, max(n - 1, 0) : n, self.page_size :] = -torch.inf
        return numbers

    def inputs(self) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(sum(self.kv_lens))
        pages = [-(-n // self.page_size) for n in self.kv_lens]
        tables = torch.full((len(pages), max(pages)), -1)
        ids = torch.randperm(sum(pages) + 3, generator=draw)
        for row, n in zip(tables, pages, strict=True):
            row[:n], ids = ids[:n], ids[n:]
        slots, kv_heads = (sum(pages) + 3) * self.page_size, 1 if self.latent else self.num_kv_heads
        k, v, q = (
            torch.randn(shape, generator=draw).to(self.dtype)
            for shape in (
                (slots, kv_heads, 48), (slots, kv_heads, 32), (sum(self.q_lens), self.num_heads, 48)
            )
        )  # fmt: skip
        masks = {}
        if self.masked:
            bits = sum(n * length for n, length in zip(self.q_lens, self.kv_lens, strict=True))
            masks["custom_mask"] = torch.rand(bits, generator=draw) < 0.7
        return {
            "q": q,
            "k_cache": k,
            "v_cache": k[..., :32] if self.latent else v,
            "q_lens": list(self.q_lens),
            "kv_lens": list(self.kv_lens),
            "block_tables": tables,
            "page_size": self.page_size,
            **masks,
            **self.attend_options(),
        }


def written_step(
    rank: int, step: Step, placement_name: str
) -> tuple[ContextParallel, Any, dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """Write a step's new tokens into this rank's shards; return also queries and separate parts."""
    inputs = step.inputs()
    placement = PLACEMENTS[placement_name](dist.get_world_size(), step.page_size)
    cp = ContextParallel(dist.group.WORLD, page_size=step.page_size, placement=placement)
    plan = cp.plan_decode(
        step.kv_lens, q_lens=step.q_lens, block_tables=inputs["block_tables"],
        custom_mask=inputs.get("custom_mask"),
    )  # fmt: skip
    queries = {"q": inputs["q"]}
    pools = [inputs["k_cache"], None if step.latent else inputs["v_cache"]]
    if step.rope_apart:
        parts = (x.contiguous() for x in inputs["q"].split([32, 16], dim=-1))
        queries = dict(zip(("q", "q_rope"), parts, strict=True))
        pools[0], ropes = (x.contiguous() for x in inputs["k_cache"].split([32, 16], dim=-1))
        queries["k_rope"] = shard_of(placement, rank, ropes, step.page_size)
    slots = torch.tensor(plan.slots)
    rows = [None if pool is None else pool[slots] for pool in pools]
    shards: list[torch.Tensor | None] = []
    for pool in pools:
        before = None if pool is None else pool.clone()
        if before is not None:
            before[slots] = torch.nan
            before = shard_of(placement, rank, before, step.page_size)
        shards.append(before)
    cp.write_kv(plan, *rows, *shards)
    return cp, plan, queries, shards


class Event(NamedTuple):
    """Event of an exchange: "post" (of rows to come), "finish" or "compute"."""

    kind: str
    call: str = ""
    num_bytes: int = 0  # bytes to come


@contextlib.contextmanager
def noted_events(
    cp: ContextParallel, *calls: str, compute: tuple[Any, str] = (ring, "attend_part")
) -> Iterator[list[Event]]:
    """Record events of exchanges of rows in these calls, and of the function that computes."""
    events: list[Event] = []
    post, finish, real = cp._exchange.post, cp._exchange.finish, getattr(*compute)

    def posted(call: str, sends: Any, receives: Any) -> Any:
        if call in calls:
            num_bytes = sum(x.numel() * x.element_size() for x in receives.values())
            events.append(Event("post", call, num_bytes))
        return post(call, sends, receives)

    def finished(posts: Any) -> None:
        if posts.call in calls:
            events.append(Event("finish", posts.call))
        finish(posts)

    def computed(*arguments: Any, **options: Any) -> Any:
        events.append(Event("compute"))
        return real(*arguments, **options)

    with (
        mock.patch.multiple(cp._exchange, post=posted, finish=finished),
        mock.patch.object(*compute, computed),
    ):
        yield events


def received_bytes(events: list[Event], call: str) -> int:
    return sum(event.num_bytes for event in events if event.call == call)


def traffic_rank(
    rank: int, case: Case, exchange: str, group: Any = None
) -> tuple[ContextParallel, Any, list[torch.Tensor], list[torch.Tensor]]:
    """Return a rank with pages: its plan, its rows of q, k, v, and its shards without new keys."""
    batch, size = make_batch(case), dist.get_world_size()
    placement = PLACEMENTS["pages"](size, case.page_size)
    cp = ContextParallel(
        group or dist.group.WORLD, page_size=case.page_size, placement=placement, exchange=exchange
    )
    plan = make_plan(cp, case, batch)
    tokens = (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    shards = [
        shard_of(cp.placement, rank, pool, case.page_size)
        for pool in (batch.k_cache, batch.v_cache)
    ]
    return cp, plan, [cp.shard(plan, x) for x in tokens], shards


def run_traffic(
    rank: int, case: Case, exchanges: tuple[str, ...], make_group: Callable[[], Any] = lambda: None
) -> dict[str, dict[str, Any]]:
    """Return for each exchange the bytes that this rank received, and the order of events."""
    group = make_group()
    return {exchange: _traffic_of(rank, case, exchange, group) for exchange in exchanges}


def _traffic_of(rank: int, case: Case, exchange: str, group: Any) -> dict[str, Any]:
    """Return the traffic of two calls, and the events of "gather" in one call that also writes."""
    cp, plan, (q, k, v), shards = traffic_rank(rank, case, exchange, group)
    sizes = {
        "num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads,
        "head_dim": case.head_dim, "element_bytes": 4,
    }  # fmt: skip
    in_rounds = exchange == "ring"
    with (
        noted_events(cp, "write_kv", "attend") as events,
        mock.patch.multiple(rounds, **ROUNDS) if in_rounds else contextlib.nullcontext(),
    ):
        cp.write_kv(plan, k, v, *shards)
        writing = list(events)
        events.clear()
        cp.attend(plan, q, *shards)
    mine = plan.batch.owner == rank
    mine[plan.local_rows] = False
    answer = {
        "events": [event.kind for event in events],
        "received": [received_bytes(writing, "write_kv"), received_bytes(events, "attend")],
        "all bytes": (cp.sent_bytes, cp.received_bytes),
        "choice": cp.choose_exchange(plan, **sizes).received_bytes,
        "rows to write": int(mine.sum()),
    }
    if exchange == "gather":
        with noted_events(cp, "attend") as events, mock.patch.multiple(rounds, **ROUNDS):
            cp.attend(plan, q, *shards, k_local=k, v_local=v)
        answer["events of one call"] = [event.kind for event in events]
        chosen = cp.choose_exchange(plan, **sizes, writes=True).received_bytes["gather"]
        answer["one call"] = received_bytes(events, "attend"), chosen
    return answer


STATE_EXCHANGES = ("gather", "all_to_all")
HEADS = ("all", "own")  # heads of results, and of queries
WAYS = [("auto", "all", "all"), *itertools.product(STATE_EXCHANGES, HEADS, HEADS)]


def run_decode(rank: int, runs: list[tuple[Step, str]], traffic: Step) -> tuple[dict, dict]:
    return run_ways(rank, runs), run_received(rank, traffic)


def run_ways(rank: int, runs: list[tuple[Step, str]]) -> dict[tuple[Step, str], dict]:
    """Return out and lse of steps over placements, by every way, and the heads of this rank."""
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
    """Return by way: received bytes, predicted bytes, rounds, and the choice of "auto"."""
    cp, plan, inputs, shards = written_step(rank, step, "pages")
    answer = {}
    for exchange, out_heads in itertools.product(STATE_EXCHANGES, HEADS):
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
