# SPDX-License-Identifier: Apache-2.0
"""Dense attention of a decode step, over a pool that prefill ranks have written."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn.attention import plan_attention, run_attention
from cpattn.distributed import ContextParallel

from .codes import scales_of
from .model import DenseConfig


class DecodeAttention:
    """One step: writes new keys and values into the pool, then attends with one query each."""

    def __init__(
        self,
        config: DenseConfig,
        pool: Any,
        block_tables: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._scale = config.head_dim**-0.5
        self.chosen = torch.empty(len(kv_lens), 0, dtype=torch.int32)  # all keys are
        self._plan = plan_attention(
            q_lens=np.ones(len(kv_lens), np.int32),
            kv_lens=kv_lens,
            block_tables=block_tables,
            page_size=pool.page_size,
            num_pages=pool.num_pages,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool = self._pool
        pool.set_kv_buffer(layer, self._slots, k, v)
        out: Any = run_attention(
            self._plan,
            q,
            pool.get_key_buffer(layer),
            pool.get_value_buffer(layer),
            scale=self._scale,
            **scales_of(pool, layer),
        )
        return out


class ShardedDecodeAttention:
    """Decode step of one of several ranks with shares of the keys; all have all queries."""

    def __init__(
        self,
        config: DenseConfig,
        cp: ContextParallel,
        pool: Any,
        block_tables: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        placement: Any = cp.placement
        self._cp, self._pool = cp, pool
        self._scale = config.head_dim**-0.5
        self._has_codes = config.has_codes
        self.chosen = torch.empty(len(kv_lens), 0, dtype=torch.int32)  # all keys are
        self._plan = cp.plan_decode(kv_lens, block_tables=block_tables)
        kept, self._own_slots = placement.filter_local(slots, cp.cp_rank)
        self._kept = torch.from_numpy(kept)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches = self._pool.get_kv_buffer(layer)
        if self._has_codes:  # the pool makes them from rows
            self._pool.set_kv_buffer(layer, self._own_slots, k[self._kept], v[self._kept])
        else:
            self._cp.write_kv(self._plan, k, v, *caches)
        scales = scales_of(self._pool, layer)
        out: Tensor = self._cp.decode(self._plan, q, *caches, scale=self._scale, **scales)
        return out
