# SPDX-License-Identifier: Apache-2.0
"""Plans of KV pools whose pages are striped over ranks (``--enable-kv-cache-sharding``).

sglang makes these plans from dozens of small tensor operations per request. This module makes them
on the host, and copies one or two arrays to the device of sglang's tensors. The state stays in
sglang's tensors, so its own functions can continue from it at any time.

The functions wrap sglang's own and call them in its debug mode, for its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ... import _core
from ...transfer.sglang_0_5_23.shards import (
    filter_kv_indices_for_shard_rank as filter_kv_indices_for_shard_rank,
)

_ALLOCATOR = "PageInterleavePoolAllocator"


def alloc_extend(
    original: Callable[..., Any],
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
    rotation_bases: Any = None,
) -> torch.Tensor | None:
    """Run ``PageInterleavePoolAllocator.alloc_extend`` with all new pages from one plan."""
    if self.debug_mode:
        return original(
            self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc,
            extend_num_tokens, num_new_pages, rotation_bases,
        )  # fmt: skip
    prefixes, ends = np.asarray(prefix_lens_cpu), np.asarray(seq_lens_cpu)
    num_tokens = int(ends.sum()) - int(prefixes.sum())
    if num_tokens != extend_num_tokens:
        raise ValueError(
            f"{_ALLOCATOR}.alloc_extend: extend_num_tokens must be {num_tokens}, as the lengths "
            f"have it, got {extend_num_tokens}"
        )
    page_size, counts = self.page_size, self.class_free_page_counts()
    drawn = _core.plan_striped_draw(
        _pages(self.shard_size, page_size), counts, prefixes, ends, rotation_bases
    )
    if drawn is None:
        return None
    needs, rows = drawn
    if any(n > len(free) for n, free in zip(needs, self.class_free_pages, strict=True)):
        self.merge_and_sort_free()
    lists = self.class_free_pages
    taken = torch.cat([free[:need] for free, need in zip(lists, needs, strict=True)])
    self.class_free_pages = [free[need:] for free, need in zip(lists, needs, strict=True)]
    in_page = torch.arange(page_size, dtype=torch.int64, device=taken.device)
    slots = (taken[:, None] * page_size + in_page).view(-1)
    return slots.index_select(0, _to(rows, taken.device))


def free(original: Callable[..., Any], self: Any, free_index: torch.Tensor) -> None:
    """Run ``PageInterleavePoolAllocator.free`` with one copy to the host, and one back."""
    if self.debug_mode or self.free_group is not None or free_index.numel() == 0:
        return original(self, free_index)
    shard_size, page_size = self.shard_size, self.page_size
    end = (self.num_pages // shard_size + 1) * shard_size * page_size
    pages, counts = _core.split_striped_pages(
        _pages(shard_size, page_size), free_index.reshape(-1).cpu(), end
    )
    freed = _to(pages, self.device).split(counts)
    lists = self.class_release_pages if self.need_sort else self.class_free_pages
    for r, count in enumerate(counts):
        if count:
            lists[r] = torch.cat((freed[r], lists[r]))
    return None


def begin_shard_extend(
    original: Callable[..., Any],
    self: Any,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens_cpu: Sequence[int],
    seq_lens_cpu: Sequence[int],
) -> None:
    """Run ``PageInterleaveKVPoolMixin.begin_shard_extend`` by `plan_shard_gather`.

    sglang itself handles a batch with reserved pages, as in a warm-up.
    """
    arguments = req_to_token, req_pool_indices, prefix_lens_cpu, seq_lens_cpu
    plan = None if self._debug_plan_checks else _gather_plan(self, *arguments)
    if plan is None:
        return original(self, *arguments)
    planned = np.concatenate((plan.prefix_pages, plan.chunk_pages))
    places = _to(np.stack((planned, plan.page_pos[planned])).astype(np.int64), self.device)
    self._page_pos.fill_(plan.trash_page)
    self._page_pos.index_copy_(0, places[0], places[1].to(torch.int32))
    self._epoch += 1
    self._block_pages = plan.block_pages
    self._shard_extend_active = True
    self._translate_cache.clear()
    self._send_pages = self._send_rows = None
    if plan.block_pages:
        self._send_pages = _to(plan.send_pages[self.shard_rank].astype(np.int64), self.device)
        page_size = self.shard_spec.page_size
        in_page = torch.arange(page_size, dtype=torch.int64, device=self.device)
        self._send_rows = (self._send_pages[:, None] * page_size + in_page).reshape(-1)
        self._prefetch_layer(self.start_layer)
    return None


def _gather_plan(
    self: Any,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens_cpu: Sequence[int],
    seq_lens_cpu: Sequence[int],
) -> _core.ShardGatherPlan | None:
    """Return the plan in units of pages; it reads only the first slot of each page."""
    spec, page_size = self.shard_spec, self.shard_spec.page_size
    prefixes, ends = (np.asarray(lens, np.int64) for lens in (prefix_lens_cpu, seq_lens_cpu))
    if (prefixes % page_size).any():
        raise ValueError(
            f"PageInterleaveKVPoolMixin.begin_shard_extend: prefix_lens_cpu must be multiples of "
            f"page_size {page_size}, got {prefixes.tolist()}"
        )
    ends = -(-ends // page_size)
    sampled = req_to_token[:, : int(ends.max(initial=0)) * page_size : page_size]
    slots = sampled.index_select(0, req_pool_indices.to(sampled.device)).cpu().numpy()
    pages = slots // page_size
    if (pages[np.arange(pages.shape[1]) < ends[:, None]] < spec.shard_size).any():
        return None
    return _core.plan_shard_gather(
        pages, None, prefixes // page_size, ends, _pages(spec.shard_size, 1),
        self.size // page_size, spec.max_prefix_tokens // page_size,
        spec.chunk_tokens // page_size,
    )  # fmt: skip


def _pages(shard_size: int, page_size: int) -> _core.Interleave:
    return _core.Interleave(shard_size, page_size, _ALLOCATOR, "page_size")


def _to(values: Any, device: Any) -> torch.Tensor:
    """Return a tensor of the values. Copies from pinned memory do not wait for the device."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
