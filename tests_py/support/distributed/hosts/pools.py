# SPDX-License-Identifier: Apache-2.0
"""Pools of hosts; the ranks of a host share its pool."""

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn import _core
from cpattn.distributed import ContextParallel
from cpattn.distributed.layers import rounds
from cpattn.distributed.transport import host
from cpattn.distributed.transport.terms import TERMS
from cpattn.kv import MHATokenToKVPool
from cpattn_lab.cost_model import AttentionLayer, exchange_work
from support.distributed import disagreements
from support.distributed import shared_pool_worker as pools
from support.distributed.distributed_worker import error_of, make_plan
from support.distributed.hosts.layouts import Layout, members_of, on_hosts
from support.distributed.prefill_batches import Case, make_batch
from support.distributed.sharded_worker import ROUNDS


def run_cases(rank: int, layout: Layout, cases: list[Case]) -> list[dict]:
    with on_hosts(layout, rank):
        return [_run_case(case) for case in cases]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).flatten()


def _run_case(case: Case) -> dict:
    """Compare bits in hosts' pools and in ranks' own pools, written before attention or by it."""
    batch = make_batch(case)
    options = {"strategy": case.strategy, "page_size": case.page_size}
    tcp = ContextParallel(dist.group.WORLD, transport="tcp", **options)
    shm = ContextParallel(dist.group.WORLD, **options)
    changes = {}
    if case.num_tokens is not None:  # padding tokens all write to one slot
        slots = make_plan(shm, case, batch).slots.copy()
        slots[sum(case.extend_lens) :] = len(batch.k_cache) - 1
        changes["out_cache_loc"] = slots
    plan, other_plan = (make_plan(cp, case, batch, **changes) for cp in (shm, tcp))
    rows = (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    q, k, v = (shm.shard(plan, x) for x in rows)
    sent, same = [], []
    for how in (None, ROUNDS, {}):  # own calls, head by head, all at once
        pool = pools.make_pool(shm, case, batch)
        caches = pool.get_kv_buffer(pools.LAYER)
        own = [batch.k_cache.clone(), batch.v_cache.clone()]
        new = {} if how is None else {"k_local": k, "v_local": v}
        if how is None:
            with pools.counting_sends() as sends:
                shm.write_kv(plan, k, v, *caches)
            sent = [num_bytes for _, num_bytes in sends]
            tcp.write_kv(other_plan, k, v, *own)
        with mock.patch.multiple(rounds, **how) if how else contextlib.nullcontext():
            out = shm.attend(plan, q, *caches, **new)
            alone = tcp.attend(other_plan, q, *own, **new)
        dist.barrier()  # all ranks have written, and none writes again
        both = [(out, alone), *zip(caches, own, strict=True)]
        same += [torch.equal(bits(x), bits(y)) for x, y in both]
        same += [not pool.get_key_buffer(i).count_nonzero() for i in (0, 2)]
        dist.barrier()
    return {
        "sent": sent,
        "slots": [slot for slot in plan.own_slots.tolist() if slot >= 0],
        "all slots": plan.slots.tolist(),
        "same": same,
    }


def run_bytes(rank: int, layout: Layout, lengths: tuple[int, int]) -> dict:
    """Return the bytes and peers of one call of `write_kv`, with shared and private pools."""
    extend, prefix = lengths
    case = Case("bytes", (extend,), (prefix,), strategy="contiguous", dtype=torch.bfloat16)
    batch = make_batch(case)
    cp = ContextParallel(dist.group.WORLD, strategy=case.strategy, page_size=case.page_size)
    plan = make_plan(cp, case, batch)
    with on_hosts(layout, rank):
        pool = pools.make_pool(cp, case, batch)
    rows = torch.ones(plan.num_local_rows, 2, 32, dtype=case.dtype)
    answer = {}
    for name, caches in (
        ("shared", pool.get_kv_buffer(pools.LAYER)),
        ("private", [batch.k_cache, batch.v_cache]),
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
    before, q = cp.sent_bytes, torch.ones(plan.num_local_rows, 4, 32, dtype=case.dtype)
    with mock.patch.multiple(rounds, **ROUNDS):  # a round for each head
        cp.attend(plan, q, *pool.get_kv_buffer(pools.LAYER), k_local=rows, v_local=rows)
    answer["by attention"] = cp.sent_bytes - before
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
        "rows": plan.rows_per_rank[rank] * 2 * 2 * 32 * 2,
    }


def run_topologies(rank: int, cases: list[tuple[Layout, str]]) -> list[dict[str, Any]]:
    return [_run_topology(rank, *case) for case in cases]


def _run_topology(rank: int, layout: Layout, apart: str) -> dict[str, Any]:
    """Return what ranks find if the last rank differs, and whose writes they see."""
    group = dist.new_group()  # it does not know its hosts yet
    real = _core.HostBarrier.meet
    refused = PermissionError(13, "Permission denied")
    patches = {
        "namespace": lambda: mock.patch.object(host, "_PID_NAMESPACE", host.Path("/")),
        "files": lambda: mock.patch.object(host, "_opened", side_effect=refused),
        "blind": lambda: mock.patch.object(
            _core.HostBarrier, "meet", lambda *arguments: [[0] for _ in real(*arguments)]
        ),
    }
    usual = contextlib.nullcontext
    last = rank == dist.get_world_size() - 1
    transport = "tcp" if apart == "asked" else "auto"
    with on_hosts(layout, rank), patches.get(apart, usual)() if last else usual():
        cp = ContextParallel(group, page_size=4, transport=transport)
        topology, memory = cp.topology(), cp.shared_memory()
        insisting = "no error"
        if apart != "asked":
            insisting = error_of(lambda: ContextParallel(group, page_size=4, transport="shm"))[0]
    pool = MHATokenToKVPool(
        size=4, page_size=4, num_layers=1, num_kv_heads=1, head_dim=8, memory=memory
    )
    if rank == members_of(topology.ranks_of_host, rank)[0] or memory is None:
        pool.get_key_buffer(0).fill_(1.0 + rank)
    dist.barrier()
    seen = pool.get_key_buffer(0).unique().tolist()
    dist.barrier()
    return {"topology": topology, "seen": seen, "memory": repr(memory), "insisting": insisting}


def run_disagreements(rank: int, layout: Layout) -> tuple[dict, dict]:
    over_gloo, usable = disagreements.run_replicated(rank)
    with on_hosts(layout, rank):
        assert ContextParallel(dist.group.WORLD, page_size=1).shared_memory() is not None
    with pools.counting_sends() as sent:
        on_shared, still = disagreements.run_replicated(rank)
    assert usable
    assert still
    others = len(layout[0]) * 8 * len(TERMS)
    agreed = [peer for peer, num_bytes in sent if num_bytes == others]
    if len(layout) == 1:  # only rows are sent, no digests
        assert max(num_bytes for _, num_bytes in sent) > 100
    else:
        assert len(agreed) >= len(on_shared)
        assert set(agreed) == {rank ^ 1}  # one rank of the other host
    return over_gloo, on_shared
