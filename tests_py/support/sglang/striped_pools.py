# SPDX-License-Identifier: Apache-2.0
"""Small allocators and pools of sglang over ranks that stripe pages, without a device."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cpattn.kv import StripedAllocator


def random_sizes(rng: np.random.Generator) -> dict[str, int]:
    return {"shard_size": int(rng.integers(2, 9)), "page_size": int(rng.choice([1, 2, 4, 7]))}


def make_allocator(sglang: SimpleNamespace, size: int, sizes: Any, need_sort: bool) -> Any:
    return sglang.striped_allocator.PageInterleavePoolAllocator(
        size=size, physical_page_size=sizes["page_size"], shard_size=sizes["shard_size"],
        dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=need_sort,
    )  # fmt: skip


def extend_arguments(prefix_lens: list[int], seq_lens: list[int]) -> tuple[Any, ...]:
    """Return the arguments of `alloc_extend`, without the bases."""
    prefixes, lens = torch.tensor(prefix_lens), torch.tensor(seq_lens)
    last_loc = torch.zeros_like(prefixes)  # only its debug mode reads this
    return prefixes, prefixes, lens, lens, last_loc, sum(seq_lens) - sum(prefix_lens)


def random_extend(
    rng: np.random.Generator, page_size: int
) -> tuple[list[int], list[int], list[int | None]]:
    """Return prefixes, lengths and rotation bases of a batch."""
    bs = int(rng.integers(1, 4))
    prefixes = (rng.integers(0, 5, bs) * page_size).tolist()
    lens = [prefix + int(rng.integers(1, 4 * page_size + 1)) for prefix in prefixes]
    bases = [None if rng.random() < 0.6 else int(rng.integers(-9, 9)) for _ in range(bs)]
    return prefixes, lens, bases


def make_pool(sglang: SimpleNamespace, rank: int, sizes: Any, scratch: Any, size: int) -> Any:
    """Make the common part of sglang's pools, without buffers and without the gather itself."""
    pool = object.__new__(sglang.striped_pools.PageInterleaveKVPoolMixin)
    page_size, shard_size = sizes["page_size"], sizes["shard_size"]
    spec = SimpleNamespace(shard_rank=rank, **sizes, **scratch)
    trash_base = scratch["max_prefix_tokens"] + scratch["chunk_tokens"]
    vars(pool).update(
        shard_spec=spec, shard_rank=rank, device="cpu", size=size, start_layer=0, _epoch=0,
        _chunk_base=scratch["max_prefix_tokens"], _trash_base=trash_base, _translate_cache={},
        _page_pos=torch.full((shard_size * (size // page_size + 2),), -1, dtype=torch.int32),
        _local_page_stride=size // page_size + 2, _debug_plan_checks=True, _write_plan_key=None,
        placement=sglang.striping.PageInterleavePlacement(spec), _prefetch_layer=lambda layer: None,
    )  # fmt: skip
    return pool


def random_scratch(rng: np.random.Generator, sizes: Any) -> dict[str, int]:
    granule = sizes["shard_size"] * sizes["page_size"]
    return {
        "max_prefix_tokens": int(rng.integers(0, 16)) * granule,
        "chunk_tokens": int(rng.integers(0, 16)) * sizes["page_size"],
    }


def random_table(
    rng: np.random.Generator, allocator: StripedAllocator
) -> tuple[np.ndarray, list[int], list[int]]:
    """Return slots of requests that share prefixes and continue differently."""
    page_size = allocator.page_size
    trees = [allocator.alloc_cyclic(int(rng.integers(9)), 6 * page_size) for _ in range(3)]
    allocator.free(trees.pop(0))
    table = np.full((6, 12 * page_size), -7)
    prefixes, lens = [], []
    for i in range(int(rng.integers(1, 5))):
        tree = trees[rng.integers(2)]
        prefix = int(rng.integers(0, 7)) * page_size
        end = prefix + int(rng.integers(0, 3 * page_size + 1))
        base = int(tree[0]) // page_size % allocator.shard_size
        table[i, :prefix] = tree[:prefix]
        if end > prefix:
            table[i, prefix:end] = allocator.alloc_extend([prefix], [end], [base])
        prefixes.append(prefix)
        lens.append(end)
    return table, prefixes, lens
