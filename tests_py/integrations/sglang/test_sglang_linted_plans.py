# SPDX-License-Identifier: Apache-2.0
"""Plans of all ranks by sglang's own code, proved by the linter."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cpattn.kv import PageInterleave
from cpattn_proof import lint
from cpattn_proof.linting.adapters.context_parallel import from_metadata
from cpattn_proof.linting.adapters.shards import from_striped_writes
from support.sglang import sglang_planning
from support.sglang import striped_pools as pools
from support.sglang.installed import MARKS

pytestmark = MARKS


def metadata_of(
    sglang: SimpleNamespace, name: str, size: int, extend: list[int], prefix: list[int], pad: int
) -> list[Any]:
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
    assert ("COV" in checked) == (name == "zigzag")  # interleaved metadata has no keys


def sglang_padded(sglang: SimpleNamespace, made: list[Any], size: int) -> list[Any]:
    with sglang.runtime.get_context().override_server_args(
        tp_size=size, attn_cp_size=size, enable_prefill_cp=True, cp_strategy="zigzag"
    ):
        for one in made:
            sglang.padding.pad_logical_token_to_physical(one)
    assert all(one.per_rank_logical_token is not None for one in made)
    return made


def striped_batch(sglang: SimpleNamespace, rng: np.random.Generator) -> tuple[Any, ...]:
    """Return prefixes from sglang's allocator, their extension, and the rows that ranks write."""
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
    """`PageInterleavePoolAllocator` gives the slots, `_get_write_plan` the rows of each rank."""
    rng = np.random.default_rng(9)
    for _ in range(60):
        arguments, options = striped_batch(sglang, rng)
        report = lint(from_striped_writes(*arguments, **options))
        assert report.findings == ()
        assert set(report.checked) >= {"OWN", "LEN", "ADDR"}
