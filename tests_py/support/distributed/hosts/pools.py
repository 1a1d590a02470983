# SPDX-License-Identifier: Apache-2.0
"""What the ranks of tests on several hosts run that share pools there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.cost_model import AttentionLayer, exchange_work
from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import rounds
from cpattn.distributed.transport import host
from cpattn.distributed.transport.exchange import TERMS
from cpattn.kv import MHATokenToKVPool
from support.distributed import distributed_worker as worker
from support.distributed import shared_pool_worker as pools
from support.distributed.hosts.layouts import Layout, on_hosts
from support.distributed.prefill_batches import Case, make_batch


def run_cases(rank: int, layout: Layout, cases: list[Case]) -> list[dict]:
    with on_hosts(layout, rank):
        return [_run_case(case) for case in cases]


def _run_case(case: Case) -> dict:
    """As of a shared pool; and attention that writes, in rounds of single heads and in one."""
    answer = pools.run_case(case)
    batch = make_batch(case)
    options = {"strategy": case.strategy, "page_size": case.page_size}
    tcp = ContextParallel(dist.group.WORLD, transport="tcp", **options)
    cp = ContextParallel(dist.group.WORLD, **options)
    plan = worker.make_plan(cp, case, batch)
    q, k, v = (
        cp.shard(plan, x) for x in (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    )
    new = {"k_local": k, "v_local": v}
    answer["attended"] = []
    for least_bytes in (1, rounds._LEAST_BYTES):
        pool = pools.make_pool(cp, case, batch)
        caches = pool.get_kv_buffer(pools.LAYER)
        own = [batch.k_cache.clone(), batch.v_cache.clone()]
        with mock.patch.object(rounds, "_LEAST_BYTES", least_bytes), _without_flops(least_bytes):
            out = cp.attend(plan, q, *caches, **new)
            alone = tcp.attend(plan, q, *own, **new)
        dist.barrier()  # until all have written and nobody writes again
        both = [(out, alone), *zip(caches, own, strict=True)]
        answer["attended"].append([
            bool(torch.equal(pools.bits(x).flatten(), pools.bits(y).flatten())) for x, y in both
        ])  # fmt: skip
        dist.barrier()
    return answer


@contextlib.contextmanager
def _without_flops(least_bytes: int) -> Iterator[None]:
    """Heads go in rounds, however much is computed with them."""
    if least_bytes > 1:
        yield
        return
    with mock.patch.object(rounds, "_MOST_FLOPS_PER_BYTE", 1 << 60):
        yield


def run_bytes(rank: int, layout: Layout, lengths: tuple[int, int]) -> dict:
    """What one call of `write_kv` sends to whom, by shared pools and by private ones."""
    with on_hosts(layout, rank):
        extend, prefix = lengths
        case = Case("bytes", (extend,), (prefix,), strategy="contiguous", dtype=torch.bfloat16)
        batch = make_batch(case)
        cp = ContextParallel(dist.group.WORLD, strategy=case.strategy, page_size=case.page_size)
        plan = worker.make_plan(cp, case, batch)
        pool = pools.make_pool(cp, case, batch)
        rows = torch.ones(plan.num_local_rows, 2, 32, dtype=case.dtype)
        answer = {}
        private = [batch.k_cache, batch.v_cache]
        for name, caches in (
            ("shared", pool.get_kv_buffer(pools.LAYER)),
            ("private", private),
        ):
            before = cp.sent_bytes, cp.received_bytes
            with pools.counting_sends() as sent:
                cp.write_kv(plan, rows, rows, *caches)
            answer[name] = {
                "by peer": sent,
                "sent": cp.sent_bytes - before[0],
                "received": cp.received_bytes - before[1],
            }
            dist.barrier()
    layer = AttentionLayer(num_kv_heads=2, num_heads=4, head_dim=32, dtype="bfloat16")
    predicted = exchange_work(
        case.extend_lens, case.seq_lens, cp_size=dist.get_world_size(), strategy=case.strategy,
        layer=layer, ranks_per_host=len(layout[0]),
    )  # fmt: skip
    return answer | {
        "predicted sent": int(predicted.sent_bytes[rank]),
        "predicted received": int(predicted.received_bytes[rank]),
        "terms": 8 * len(TERMS),
        "row": 2 * 2 * 32 * 2,
        "rows": plan.rows_per_rank,
    }


def run_rounds(rank: int, layout: Layout) -> dict:
    """What a layer sends whose two KV heads go one after the other."""
    with on_hosts(layout, rank):
        case = Case("rounds", (64,))
        batch = make_batch(case)
        cp = ContextParallel(dist.group.WORLD, page_size=case.page_size)
        plan = worker.make_plan(cp, case, batch)
        pool = pools.make_pool(cp, case, batch)
        rows = [cp.shard(plan, batch.new(case, x)) for x in (batch.k, batch.v)]
        small = mock.patch.multiple(rounds, _LEAST_BYTES=1, _MOST_FLOPS_PER_BYTE=1 << 60)
        with small, pools.counting_sends() as sent:
            cp.attend(
                plan, cp.shard(plan, batch.q), *pool.get_kv_buffer(pools.LAYER),
                k_local=rows[0], v_local=rows[1],
            )  # fmt: skip
        dist.barrier()
    told = len(layout[0]) * 8 * len(TERMS)
    assert sent[0] == ((rank + 2) % 4, told)
    return {"rows": sent[1:], "row bytes": sum(x.nbytes for x in rows)}


def run_one_pool(rank: int, layout: Layout) -> dict:
    """Whose writes a rank sees, and what it is told."""
    with on_hosts(layout, rank):
        cp = ContextParallel(dist.group.WORLD, page_size=4)
        memory = cp.shared_memory()
        pool = MHATokenToKVPool(
            size=4, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, memory=memory
        )
        if rank % 2 == 0:
            pool.get_key_buffer(0).fill_(1.0 + rank)
        dist.barrier()
        seen = pool.get_key_buffer(0)[0, 0, 0, 0].item()
        dist.barrier()
        insisting = worker._error_of(
            lambda: ContextParallel(dist.group.WORLD, page_size=4, transport="shm")
        )[0]
        return {
            "topology": cp.topology(),
            "seen": seen,
            "memory": repr(memory),
            "insisting": insisting,
        }


def run_alone(rank: int, layout: Layout) -> tuple:
    with on_hosts(layout, rank):
        cp = ContextParallel(dist.group.WORLD, page_size=4)
        topology = cp.topology()
        return topology.transport, topology.reason, cp.shared_memory()


def run_without_files(rank: int, layout: Layout):
    """What all find if the last rank may not open what the others of its host have."""
    refused = mock.patch.object(
        host, "_opened", side_effect=PermissionError(13, "Permission denied")
    )
    last = rank == dist.get_world_size() - 1
    with on_hosts(layout, rank), refused if last else contextlib.nullcontext():
        cp = ContextParallel(dist.group.WORLD, page_size=4)
        assert cp.shared_memory() is None
        return cp.topology()


def run_disagreements(rank: int, layout: Layout) -> tuple[dict, dict]:
    """What ranks are told over gloo, and then the same over both levels."""
    over_gloo, _ = worker.run_disagreements(rank)
    with on_hosts(layout, rank):
        assert ContextParallel(dist.group.WORLD, page_size=1).shared_memory() is not None
    with pools.counting_sends() as sent:
        on_two_levels, _ = worker.run_disagreements(rank)
    agreed = [peer for peer, num_bytes in sent if num_bytes == 2 * 8 * len(TERMS)]
    assert len(agreed) >= len(on_two_levels)
    assert set(agreed) == {rank ^ 1}  # one rank of the other host
    return over_gloo, on_two_levels
