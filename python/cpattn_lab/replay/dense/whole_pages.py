# SPDX-License-Identifier: Apache-2.0
"""Pages of a batch gathered from the shards of all ranks, for code without an exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cpattn.distributed import ContextParallel
from cpattn.scheduling.scheduler import Batch


class WholePages:
    """Copies of the pages that a batch sees, gathered by torch from the pools of all ranks.

    They read like a pool of one layer; `tables` has its pages instead of the batch's. All ranks of
    a stage make it, and set its layer, at the same time.
    """

    def __init__(self, cp: ContextParallel, pool: Any, batch: Batch) -> None:
        placement: Any = cp.placement
        self._cp, self._pool = cp, pool
        self.page_size = cp.page_size
        self.scale_dtype = pool.scale_dtype
        width = np.arange(batch.block_tables.shape[1]) * cp.page_size
        used = width < np.array(batch.seq_lens)[:, None]
        ids, places = np.unique(batch.block_tables[used], return_inverse=True)
        self.tables = np.full(batch.block_tables.shape, -1, np.int32)
        self.tables[used] = places
        self._num_pages = len(ids)
        slots = (ids[:, None].astype(np.int64) * cp.page_size + np.arange(cp.page_size)).ravel()
        found = [placement.filter_local(slots, rank) for rank in range(cp.cp_size)]
        self._places = [torch.from_numpy(positions) for positions, _ in found]
        self._own = torch.from_numpy(found[cp.cp_rank][1])

    def of_layer(self, layer: int) -> WholePages:
        """Gather the buffers of a layer."""
        pool = self._pool
        self._k, self._v = (self._gathered(x) for x in pool.get_kv_buffer(layer))
        if self.scale_dtype:
            self._k_scale = self._gathered(pool.get_key_scale_buffer(layer))
            self._v_scale = self._gathered(pool.get_value_scale_buffer(layer))
        return self

    def get_kv_buffer(self, _: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the gathered layer, like a pool."""
        return self._k, self._v

    def get_key_scale_buffer(self, _: int) -> Tensor:
        """Return the scales of keys of the gathered layer, like a pool."""
        return self._k_scale

    def get_value_scale_buffer(self, _: int) -> Tensor:
        """Return the scales of values of the gathered layer, like a pool."""
        return self._v_scale

    def _gathered(self, buffer: Tensor) -> Tensor:
        """Gather [pages, page_size, ...] from this rank's buffer and those of the others."""
        rows = buffer.flatten(0, 1).flatten(1).view(torch.uint8)
        most = max(len(places) for places in self._places)
        own = rows.new_zeros(most, rows.shape[1])
        own[: len(self._own)] = rows.index_select(0, self._own)
        parts = [torch.empty_like(own) for _ in self._places]
        dist.all_gather(parts, own, group=self._cp.group)
        out = rows.new_empty(self._num_pages * self.page_size, rows.shape[1])
        for places, part in zip(self._places, parts, strict=True):
            out.index_copy_(0, places, part[: len(places)])
        shape = (self._num_pages, self.page_size, *buffer.shape[2:])
        return out.view(buffer.dtype).view(shape)
