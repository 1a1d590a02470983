# SPDX-License-Identifier: Apache-2.0
"""Plans that sglang's own code makes, of all ranks: proved by the linter, and refuted damaged."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cpattn
from cpattn.kv import PageInterleave
from cpattn_proof import Report, lint, simulate
from cpattn_proof.linting.adapters.context_parallel import from_metadata
from cpattn_proof.linting.adapters.shards import from_striped_writes
from support.distributed.prefill_batches import Batch, Case, expected_of, make_batch, slots_of
from support.sglang import sglang_planning
from support.sglang import striped_pools as pools
from support.sglang.installed import MARKS
from support.tolerances import assert_attended

pytestmark = MARKS


def kinds(document: dict[str, Any]) -> set[str]:
    return {found.kind for found in lint(document, shrink=False).findings}


def metadata_of(
    sglang: SimpleNamespace, name: str, size: int, extend: list[int], prefix: list[int], pad: int
) -> list[Any]:
    """Return each rank's `build_metadata`, its rows padded as a forward pass does."""
    total = [e + p for e, p in zip(extend, prefix, strict=True)]
    strategies = [sglang_planning.make_strategy(sglang, name, rank, size) for rank in range(size)]
    return [strategy.build_metadata(sum(extend) + pad, total, extend) for strategy in strategies]


@pytest.mark.parametrize("name", ["zigzag", "interleave"])
def test_metadata_of_all_ranks(sglang, name):
    rng = np.random.default_rng(5)
    checked: set[str] = set()
    for _ in range(40):
        size, bs = int(rng.integers(2, 9)), int(rng.integers(1, 5))
        extend, prefix = rng.integers(1, 90, bs).tolist(), rng.integers(0, 50, bs).tolist()
        pad = int(rng.choice([0, 0, 3]))
        made = metadata_of(sglang, name, size, extend, prefix, pad)
        assert type(made[0]).__module__.startswith("sglang.")
        report = lint(from_metadata(made, extend, prefix))
        assert report.findings == (), (size, extend, prefix, pad)
        checked |= set(report.checked)
        with_rows = sglang_padded(sglang, made, size)
        assert lint(from_metadata(with_rows, extend, prefix)).findings == ()
    assert checked >= {"OWN"}
    assert ("COV" in checked) == (name == "zigzag")  # interleaved metadata says no keys


def sglang_padded(sglang: SimpleNamespace, made: list[Any], size: int) -> list[Any]:
    """Pad plans by `pad_logical_token_to_physical`."""
    with sglang.runtime.get_context().override_server_args(
        tp_size=size, attn_cp_size=size, enable_prefill_cp=True, cp_strategy="zigzag"
    ):
        for one in made:
            sglang.padding.pad_logical_token_to_physical(one)
    assert all(one.per_rank_logical_token is not None for one in made)
    return made


def striped_batch(sglang: SimpleNamespace, rng: np.random.Generator) -> tuple[Any, ...]:
    """Prefixes that sglang's allocator gave earlier, their extension, and what ranks write."""
    sizes = pools.random_sizes(rng)
    page_size, shard_size = sizes["page_size"], sizes["shard_size"]
    pages, pool_size = 40, 40 * page_size
    allocator = pools.make_allocator(sglang, pool_size, sizes, need_sort=False)
    prefixes, lens, bases = pools.random_extend(rng, page_size)
    cached = [
        allocator.alloc_cyclic(0 if base is None else base, prefix).tolist() if prefix else []
        for prefix, base in zip(prefixes, bases, strict=True)
    ]
    pairs = zip(prefixes, bases, strict=True)
    bases = [0 if prefix and base is None else base for prefix, base in pairs]
    loc = allocator.alloc_extend(*pools.extend_arguments(prefixes, lens), rotation_bases=bases)
    extend = [total - prefix for total, prefix in zip(lens, prefixes, strict=True)]
    new = torch.split(loc, extend)
    tables = [
        [slot // page_size for slot in [*old, *rows.tolist()][::page_size]]
        for old, rows in zip(cached, new, strict=True)
    ]
    scratch = {"max_prefix_tokens": 0, "chunk_tokens": 0}
    writes = []
    for rank in range(shard_size):
        pool = pools.make_pool(sglang, rank, sizes, scratch, pool_size)
        positions, rows = pool._get_write_plan(loc)
        writes.append((positions.tolist(), rows.tolist()))
    options = {"page_size": page_size, "num_pages": shard_size * (pages + 1)}
    placement = PageInterleave(shard_size=shard_size, page_size=page_size)
    return (extend, prefixes, tables, writes, placement), options


def test_striped_pools(sglang):
    """`PageInterleavePoolAllocator` names the slots, `_get_write_plan` what each rank writes."""
    rng = np.random.default_rng(9)
    for _ in range(60):
        arguments, options = striped_batch(sglang, rng)
        report = lint(from_striped_writes(*arguments, **options))
        assert report.findings == ()
        assert set(report.checked) >= {"OWN", "LEN", "ADDR"}
        *others, writes, placement = arguments
        rank = next(i for i, (positions, _) in enumerate(writes) if positions)
        writes[rank] = (writes[rank][0][1:], writes[rank][1][1:])
        assert kinds(from_striped_writes(*others, writes, placement, **options)) == {"own-slot"}


# sglang's own methods make metadata, shard, pad, gather K and V, attend in halves and gather the
# result. Ranks of the simulator share what modules have, so what sglang keeps in globals of a
# process, its groups above all, is asked of the rank that runs: a group is `torch.distributed`
# itself. Pools and attention are this library's.
_WITH_PARALLEL = "cp.base", "cp.interleave", "cp.padding", "cp.zigzag", "dp_attention"


def _parallel() -> SimpleNamespace:
    """Stand in for `get_parallel` on this rank."""
    size = dist.get_world_size()
    group = SimpleNamespace(all_gather_into_tensor=dist.all_gather_single, world_size=size)
    return SimpleNamespace(attn_cp_group=group, attn_cp_rank=dist.get_rank(), attn_cp_size=size)


@contextlib.contextmanager
def ranks_of_their_own(sglang: SimpleNamespace, size: int, strategy: str) -> Iterator[None]:
    """Have sglang ask a simulation, while it runs, who it is."""
    of_ranks: dict[int, Pool] = {}

    def pool_of_rank() -> Pool:
        return of_ranks.setdefault(dist.get_rank(), Pool())

    split = {"tp_size": size, "attn_cp_size": size, "cp_strategy": strategy}
    context = sglang.runtime.get_context()
    with contextlib.ExitStack() as stack:
        stack.enter_context(context.override_server_args(enable_prefill_cp=True, **split))
        for name in _WITH_PARALLEL:
            module = importlib.import_module(f"sglang.srt.layers.{name}")
            stack.enter_context(mock.patch.object(module, "get_parallel", _parallel))
        stack.enter_context(mock.patch.object(sglang.zigzag, "get_token_to_kv_pool", pool_of_rank))
        yield


class Pool:
    """Keys and values of a rank: as in sglang's pools, one row for each slot."""

    k: torch.Tensor
    v: torch.Tensor

    def set_kv_buffer(
        self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        self.k[where.loc], self.v[where.loc] = k, v


def _forward_batch(sglang: SimpleNamespace, case: Case, batch: Batch) -> Any:
    tables, ends = batch.block_tables, zip(case.seq_lens, case.prefixes, strict=True)
    new = [slots_of(tables, s, n, case.page_size)[p:] for s, (n, p) in enumerate(ends)]
    return sglang.batch.ForwardBatch(
        forward_mode=sglang.batch.ForwardMode.EXTEND,
        batch_size=len(case.extend_lens),
        input_ids=torch.zeros(sum(case.extend_lens), dtype=torch.int64),
        req_pool_indices=torch.arange(len(case.extend_lens)),
        seq_lens=torch.tensor(case.seq_lens),
        out_cache_loc=torch.cat(new),
        seq_lens_sum=sum(case.seq_lens),
    )


def layer(
    sglang: SimpleNamespace, case: Case, spoil: Callable[[Any, int], None] | None = None
) -> torch.Tensor:
    """One layer of one prefill on this rank; the rows of the whole batch, [T, heads, dim]."""
    batch, rank, size = make_batch(case), dist.get_rank(), dist.get_world_size()
    zigzag, interleave = sglang.zigzag.ZigzagCPStrategy, sglang.interleave.InterleaveCPStrategy
    strategy = {"zigzag": zigzag, "interleave": interleave}[case.strategy](size)
    forward_batch = _forward_batch(sglang, case, batch)
    forward_batch.attn_cp_metadata = strategy.build_metadata(
        sum(case.extend_lens), case.seq_lens, list(case.extend_lens)
    )
    sglang.padding.pad_logical_token_to_physical(forward_batch.attn_cp_metadata)
    if spoil:
        spoil(forward_batch, rank)
    q, k, v = (
        strategy.shard_hidden_states(x, forward_batch)
        for x in (batch.q, batch.new(case, batch.k), batch.new(case, batch.v))
    )
    if case.strategy == "interleave":  # which has no dense attention of its own
        whole = [strategy.gather_kv_cache(x, forward_batch) for x in (q, k, v)]
        return torch.cat([x.flatten(1) for x in whole], dim=1)
    pool = sglang.zigzag.get_token_to_kv_pool()
    pool.k, pool.v = batch.k_cache.clone(), batch.v_cache.clone()
    plain = SimpleNamespace(
        is_cross_attention=False, k_scale=None, v_scale=None, layer_id=0, attn_type=None
    )
    strategy.materialize_full_kv(forward_batch, plain, k, v)
    out = strategy.run_attention(q, forward_batch, "cpu", _attention(case, batch, pool))
    return strategy.gather_hidden_states(out, forward_batch)


def _attention(case: Case, batch: Batch, pool: Pool) -> Callable[..., torch.Tensor]:
    options = {"block_tables": batch.block_tables, "page_size": case.page_size}

    def attend(q: torch.Tensor, cu_seqlens_q: Any, kv_lens: Any, longest: int) -> torch.Tensor:
        lens = {"q_lens": cu_seqlens_q.diff().tolist(), "kv_lens": kv_lens.tolist()}
        scale = case.head_dim**-0.5
        return cpattn.paged_attention(
            q.contiguous(), pool.k, pool.v, scale=scale, **lens, **options
        )

    return attend


SIZES = (2, 3, 16)
LENGTHS = (45, 70, 33), (64, 0, 7)


def simulated(sglang: SimpleNamespace, case: Case, size: int, **spoil: Any) -> tuple[Report, Any]:
    results: dict[int, torch.Tensor] = {}

    def program() -> torch.Tensor:
        results[dist.get_rank()] = layer(sglang, case, **spoil)
        return results[dist.get_rank()]

    with ranks_of_their_own(sglang, size, case.strategy):
        report = simulate(program, ranks=size, seeds=(0, 1) if size < 16 else (0,))
    return report, results


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("size", SIZES, ids="{} ranks".format)
def test_layers(sglang, size, strategy):
    """Zigzag layers have metadata, shards, K and V of all ranks, both halves, and the whole.

    Interleaved: what a DSA layer gathers of its keys is what all ranks have, in the batch's order.
    """
    case = Case("a batch", *LENGTHS, page_size=16, strategy=strategy)
    report, results = simulated(sglang, case, size)
    assert report.proved, report.text()
    assert strategy == "interleave" or "SEQ" in report.checked
    batch = make_batch(case)
    rows = batch.q, batch.new(case, batch.k), batch.new(case, batch.v)
    expected = torch.cat([x.flatten(1) for x in rows], dim=1)
    for rank in range(size):
        if strategy == "zigzag":
            assert_attended(results[rank], None, expected_of(case), "float32")
        else:
            assert torch.equal(results[rank], expected)


def test_a_rank_that_pads_otherwise_is_named(sglang):
    """Ranks that disagree about the rows of a shard gather tensors of other sizes."""

    def spoil(forward_batch: Any, rank: int) -> None:
        metadata = forward_batch.attn_cp_metadata
        if rank == 1:
            metadata.per_rank_logical_token = metadata.per_rank_actual_token

    case = Case("a batch", *LENGTHS, page_size=16)
    report, _ = simulated(sglang, case, 4, spoil=spoil)
    assert "SEQ" in {found.invariant for found in report.findings}
    assert "all_gather_into_tensor" in report.findings[0].what
