# SPDX-License-Identifier: Apache-2.0
"""Dense attention of a decode step, over a pool that prefill ranks have written into."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...attention import plan_attention, run_attention
from .codes import scales_of
from .model import DenseConfig


class DecodeAttention:
    """One step: the new keys and values into the pool, then attention of one query each."""

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
