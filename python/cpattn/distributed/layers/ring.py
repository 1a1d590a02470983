# SPDX-License-Identifier: Apache-2.0
"""Keys travel round a ring: a rank attends to one share of them while the next is on its way.

Partial results are merged in the order of the shares, whatever the order in which a rank has them,
so that a row has the same bits on every rank. Scratch of a rank: two shares of the keys and values,
and a partial result of its own rows for each share.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from ..plans.key_shares import KeyShares, LocalPages
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from .partials import ShardInputs, attend_part, merged

_PAGE = 16  # of a share on its way, in which every request begins with a new page


def attend(
    exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's rows, and their LSE."""
    rank, size, options = exchange.rank, exchange.size, inputs.options
    pages = [ring_pages(plan.batch.shares, share) for share in range(size)]
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    num_kv_heads = inputs.k.shape[1]
    block = _own_block(plan, inputs, rank, pages[rank])
    for step, share in enumerate(ring_schedule(rank, size)):
        last = step == size - 1
        coming = (share - 1) % size
        num_bytes = 0 if last else block_bytes(inputs, pages[coming], num_kv_heads)
        following = block.new_empty(num_bytes)
        posted = exchange.post(
            "attend",
            {} if last else {(rank + 1) % size: block},
            {} if last else {(rank - 1) % size: following},
        )
        taken = block_tensors(block, inputs, pages[share], num_kv_heads)
        calls = plan.batch.calls(
            share, plan.local_rows, causal=options.causal, window=options.window, pages=pages[share]
        )
        parts[share] = attend_part(calls, inputs.q, taken[0], inputs.values_of(taken), options)
        exchange.finish(posted)
        block = following
    return merged([parts[share] for share in range(size)], options.sinks)


def ring_schedule(rank: int, size: int) -> list[int]:
    """Whose keys a rank has, step after step: its own, then those that its neighbour had."""
    return [(rank - step) % size for step in range(size)]


def ring_pages(shares: KeyShares, share: int) -> LocalPages:
    """Where the keys of a share are in a block of it."""
    counts = -(-shares.counts(share) // _PAGE)
    return LocalPages(_PAGE, np.append(0, np.cumsum(counts)), np.arange(counts.sum()))


def _own_block(
    plan: ShardedPlan, inputs: ShardInputs, rank: int, pages: LocalPages
) -> torch.Tensor:
    """The keys that this rank holds, then their values, as bytes."""
    keys = plan.batch.shares.local_keys(rank)
    counts = plan.batch.shares.counts(rank)
    within = np.arange(len(keys.row)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = np.full(len(pages.ids) * _PAGE, keys.row[0] if len(keys.row) else 0)
    rows[pages.indptr[keys.request] * _PAGE + within] = keys.row
    taken = inputs.take(torch.from_numpy(rows))
    return torch.cat([x.view(torch.uint8).flatten() for x in taken])


def _shapes(
    inputs: ShardInputs, pages: LocalPages, num_kv_heads: int
) -> list[tuple[int, int, int]]:
    return [(len(pages.ids) * _PAGE, num_kv_heads, dim) for dim in inputs.kv_dims]


def block_bytes(inputs: ShardInputs, pages: LocalPages, num_kv_heads: int) -> int:
    """Of a block with keys, and values, in so many heads."""
    sizes = [prod(shape) for shape in _shapes(inputs, pages, num_kv_heads)]
    return sum(sizes) * inputs.k.element_size()


def block_tensors(
    block: torch.Tensor, inputs: ShardInputs, pages: LocalPages, num_kv_heads: int
) -> list[torch.Tensor]:
    """The block as keys, and values unless they are a part of these."""
    shapes = _shapes(inputs, pages, num_kv_heads)
    parts = block.split([prod(shape) * inputs.k.element_size() for shape in shapes])
    return [
        part.view(inputs.k.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)
    ]
