# SPDX-License-Identifier: Apache-2.0
"""Layers whose cached keys are gathered ahead, beside the same layers without, on the ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field as attribute
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel, LayerCaches
from cpattn.distributed.layers import gather_kv, rounds
from support.distributed import layer_worker as layers
from support.distributed.layer_worker import LAYERS, PAGE, STRATEGIES
from support.distributed.prefill_batches import Case
from support.distributed.sharded_faults import ODD_RANK, leave_after_agreement
from support.distributed.sharded_worker import PLACEMENTS, ROUNDS, coded_inputs, traffic_rank
from support.distributed.write_attend_worker import Rank, Tensors

NUM_LAYERS = 3


@dataclass
class Model:
    """Layers of one batch: queries, whole caches and options of each."""

    q: list[torch.Tensor]
    caches: list[Tensors]  # keys, values, rotary dimensions of keys
    options: list[dict[str, Any]]
    plan: dict[str, Any] = attribute(default_factory=dict)
    q_rope: list[torch.Tensor] | None = None


def models() -> dict[str, Model]:
    """By name; layers differ in their tensors, and some in their windows."""
    found = {}
    draws = [layers.tensors(7 + i, *[x.shape for x in layers.dense_inputs()]) for i in range(3)]
    q, caches = [draw[0] for draw in draws], [[*draw[1:], None] for draw in draws]
    for name, layer in ({"plain": layers.Layer()} | LAYERS).items():
        found[name] = Model(q, caches, [layer.attend] * NUM_LAYERS, layer.plan)
    found["windows by turns"] = Model(q, caches, [{"window": w} for w in (5, None, 0)])
    coded = coded_inputs()["codes, scales of heads"]
    codes: list[Tensors] = [[coded["k_cache"].roll(i), coded["v_cache"], None] for i in range(3)]
    scales = {key: coded[key] for key in ("k_scale", "v_scale")}
    found["codes"] = Model([coded["q"]] * NUM_LAYERS, codes, [scales] * NUM_LAYERS)
    q_latent, q_rope, latents, ropes = layers.latent_inputs()
    options = {"v_head_dim": layers.VALUE, "window": 20, "scale": 0.2}
    whole_q = [torch.cat([q_latent, q_rope], -1)] * NUM_LAYERS
    whole: list[Tensors] = [
        [torch.cat([latents, ropes], -1) * (i + 1), None, None] for i in range(3)
    ]
    found["latents"] = Model(whole_q, whole, [options] * NUM_LAYERS)
    apart: list[Tensors] = [[latents * (i + 1), None, ropes] for i in range(3)]
    found["latents, rope apart"] = Model(
        [q_latent] * NUM_LAYERS, apart, [options] * NUM_LAYERS, q_rope=[q_rope] * NUM_LAYERS
    )
    return found


def run_model(rank: Rank, model: Model, *, ahead: bool, writes: bool) -> list[torch.Tensor]:
    """Outputs, LSE and pools of all layers, with cached keys ahead or not."""
    pools = [rank.pools(*caches) for caches in model.caches]
    prefixes = None
    if ahead:
        windows = [options.get("window") for options in model.options]
        prefixes = rank.cp.prefetch(
            rank.plan, [LayerCaches(*of, window=w) for of, w in zip(pools, windows, strict=True)]
        )
    results = []
    for i, (k_cache, v_cache, k_rope) in enumerate(pools):
        k, v, ropes = (
            None if x is None else rank.rows(x[layers.new_slots()]) for x in model.caches[i]
        )
        new = {"k_local": k, "v_local": v}
        if not writes or k_rope is not None:
            # Rotary dimensions go as the values of latents.
            rest = (v, v_cache) if k_rope is None else (ropes, k_rope)
            rank.cp.write_kv(rank.plan, k, rest[0], k_cache, rest[1])
            new = {}
        rotary = {}
        if model.q_rope is not None:
            rotary = {"q_rope": rank.rows(model.q_rope[i]), "k_rope": k_rope}
        out, lse = rank.cp.attend(
            rank.plan, rank.rows(model.q[i]), k_cache, v_cache, prefetched=prefixes,
            return_lse=True, **new, **rotary, **model.options[i],
        )  # fmt: skip
        results += [x[: rank.plan.num_local_rows] for x in (out, lse)]
    assert prefixes is None or prefixes.next_layer == NUM_LAYERS
    return results + [cache for of in pools for cache in of if cache is not None]


def run_all(rank: int) -> dict[str, bool]:
    """Whether layers have the bits that they have without, by case."""
    answers = {}
    for number, (placement, make) in enumerate(PLACEMENTS.items()):
        for name, model in models().items():
            options = {
                "placement": make(dist.get_world_size(), PAGE),
                "strategy": STRATEGIES[number],
                "exchange": "gather",
            }
            one = Rank(model.plan, **options)
            expected = run_model(one, model, ahead=False, writes=False)
            for writes in (True, False):
                with mock.patch.multiple(rounds, **ROUNDS if writes else {"_MOST_ROUNDS": 8}):
                    results = run_model(one, model, ahead=True, writes=writes)
                answers[f"{placement}, {name}, {writes}"] = all(
                    torch.equal(a.nan_to_num(9), b.nan_to_num(9))
                    for a, b in zip(results, expected, strict=True)
                )
    return answers


CASE = Case("three heads", (13, 40), (64, 7), num_heads=6, num_kv_heads=3)


def run_traffic(rank: int) -> dict[str, Any]:
    """The order of posts, waits and attention in three layers, and the bytes of each call."""
    cp, plan, (q, k, v), shards = traffic_rank(rank, CASE, "gather")
    events: list[str] = []
    post, finish = cp._exchange.post, cp._exchange.finish
    attend_heads = gather_kv.HeadOutputs.attend

    def posted(call: str, sends: Any, receives: Any) -> Any:
        if "agreement" not in call:
            events.append(f"post {call}")
        return post(call, sends, receives)

    def finished(posts: Any) -> None:
        if "agreement" not in posts.call:
            events.append(f"finish {posts.call}")
        finish(posts)

    def attended(*arguments: Any) -> None:
        events.append("compute")
        attend_heads(*arguments)

    def received(call: Callable[[], Any]) -> tuple[Any, int]:
        before = cp.received_bytes
        return call(), cp.received_bytes - before

    prefixes, first = received(lambda: cp.prefetch(plan, [tuple(shards)] * NUM_LAYERS))
    cp._exchange.post, cp._exchange.finish = posted, finished
    counts = [first]
    with (
        mock.patch.object(gather_kv.HeadOutputs, "attend", attended),
        mock.patch.multiple(rounds, **ROUNDS),
    ):
        for _ in range(NUM_LAYERS):
            _, n = received(
                lambda: cp.attend(plan, q, *shards, k_local=k, v_local=v, prefetched=prefixes)
            )
            counts.append(n)
    return {
        "events": events,
        "received": counts,
        "kv_counts": plan.kv_counts,
        "buffers": [
            x.numel() for key, x in cp._exchange._buffers.items() if isinstance(key, tuple)
        ],
        "buffer_bytes": prefixes.buffer_bytes,
    }


def run_scratch(rank: int) -> list[int]:
    """How many KV heads are in their places at a time, by the least scratch and by more."""
    found = []
    case = CASE
    attend_heads = gather_kv.HeadOutputs.attend
    for more in (0, 1):
        cp, plan, (q, k, v), shards = traffic_rank(rank, case, "gather")
        row = (case.head_dim + case.v_head_dim) * 4
        slots = plan.page_size * int((plan.block_tables >= 0).sum())
        least = (2 * sum(case.prefixes) + plan.num_tokens) * case.num_kv_heads * row + slots * row
        cp.max_scratch_bytes = least + more * slots * row
        tables = plan.block_tables
        plan = cp.plan(case.extend_lens, case.seq_lens, block_tables=tables)
        widths: list[int] = []

        def attended(self: Any, heads: slice, *rest: Any, widths: list[int] = widths) -> None:
            widths.append(heads.stop - heads.start)
            attend_heads(self, heads, *rest)

        prefixes = cp.prefetch(plan, [tuple(shards)])
        with mock.patch.object(gather_kv.HeadOutputs, "attend", attended):
            cp.attend(plan, q, *shards, k_local=k, v_local=v, prefetched=prefixes)
        found.append(max(widths))
    return found


def run_disagreements(rank: int) -> tuple[dict[str, str], bool]:
    """What ranks are told if rank 1 does something else, and whether layers are right behind."""
    told: dict[str, str] = {}
    is_odd = rank == ODD_RANK

    def parts() -> tuple[ContextParallel, Any, list[torch.Tensor], list[torch.Tensor]]:
        return traffic_rank(rank, CASE, "gather")

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            told[name] = f"{type(error).__name__}: {error}"

    cp, plan, (q, k, v), shards = parts()
    new = {"k_local": k, "v_local": v}

    def prefetch(num_layers: int = NUM_LAYERS, **window: Any) -> Any:
        return cp.prefetch(plan, [LayerCaches(*shards, **window)] * num_layers)

    expected = cp.attend(plan, q, *shards, **new)
    prefixes = prefetch()
    others = [x.clone() for x in shards]
    attempt("without", lambda: cp.attend(
        plan, q, *shards, **new, prefetched=None if is_odd else prefixes))  # fmt: skip
    attempt("other caches", lambda: cp.attend(
        plan, q, *(others if is_odd else shards), **new, prefetched=prefixes))  # fmt: skip
    attempt("attends", lambda: cp.attend(plan, q, *shards) if is_odd else prefetch())
    attempt("fewer layers", lambda: prefetch(2 if is_odd else 3))
    attempt("another window", lambda: prefetch(window=5 if is_odd else 6))
    attempt("refused", lambda: prefetch(0 if is_odd else 3))
    # None of this was sent: what was under way from before is still that of the first layer.
    right = torch.equal(cp.attend(plan, q, *shards, **new, prefetched=prefixes), expected)
    later = prefetch()  # the rest of the first is dropped
    attempt("dropped", lambda: cp.attend(plan, q, *shards, **new, prefetched=prefixes))
    right &= torch.equal(cp.attend(plan, q, *shards, **new, prefetched=later), expected)
    right &= torch.equal(cp.attend(plan, q, *shards, **new), expected)  # without, between two
    del prefixes, later, cp  # under way still
    cp, plan, (q, k, v), shards = parts()
    prefixes = prefetch()
    for _ in range(NUM_LAYERS):
        right &= torch.equal(cp.attend(plan, q, *shards, **new, prefetched=prefixes), expected)
    return told, right


LARGE = Case("large", (4, 4), (5000, 100), num_heads=8, num_kv_heads=8, head_dim=64, v_head_dim=64)


def late_rows(post: Callable[..., Any]) -> Callable[..., Any]:
    """Posts rows when the other ranks have dropped those that they receive."""

    def late(call: str, *arguments: Any) -> Any:
        if "agreement" not in call:
            time.sleep(0.2)
        return post(call, *arguments)

    return late


def run_dropped(rank: int) -> bool:
    """Whether calls are right behind rows that are under way for objects that are no more."""
    cp, plan, _, shards = traffic_rank(rank, LARGE, "gather")
    if rank == ODD_RANK:
        cp._exchange.post = late_rows(cp._exchange.post)
    cp.prefetch(plan, [tuple(shards)])
    del cp
    gc.collect()
    plain = ContextParallel(dist.group.WORLD, page_size=4)
    plan = plain.plan([8], block_tables=[range(2)])
    rows = torch.arange(16.0).view(8, 2)
    return torch.equal(plain.gather(plan, plain.shard(plan, rows)), rows)


def run_loss(rank: int) -> str:
    """What the others are told if the last rank ends as it sends cached keys."""
    cp, plan, (q, k, v), shards = traffic_rank(rank, CASE, "gather")
    prefixes = cp.prefetch(plan, [tuple(shards)] * NUM_LAYERS)
    new = {"k_local": k, "v_local": v, "prefetched": prefixes}
    cp.attend(plan, q, *shards, **new)
    if rank == dist.get_world_size() - 1:
        cp._exchange.post = leave_after_agreement(cp._exchange.post, "attend (prefix)")
    try:
        for _ in range(NUM_LAYERS - 1):
            cp.attend(plan, q, *shards, **new)
    except RuntimeError as error:
        return str(error)
    return "no error"
