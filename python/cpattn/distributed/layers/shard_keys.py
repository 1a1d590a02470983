# SPDX-License-Identifier: Apache-2.0
"""The keys and values that a rank holds of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rows import take_rows


@dataclass(frozen=True)
class ShardKeys:
    """Keys and values of a layer in this rank's pools, checked."""

    k: torch.Tensor  # [slots, num_kv_heads, head_dim]
    v: torch.Tensor  # [slots, num_kv_heads, v_head_dim], which may be a part of the keys
    k_rope: torch.Tensor | None  # the last dimensions of the keys, where they are apart
    shares_values: bool  # values are a part of the keys

    def take(self, rows: torch.Tensor, heads: slice = slice(None)) -> list[torch.Tensor]:
        """Copies of keys, and of values unless they are a part of these: [rows, heads, dim]."""
        keys = take_rows(self.k[:, heads], rows)
        if self.k_rope is not None:
            keys = torch.cat([keys, take_rows(self.k_rope[:, heads], rows)], dim=-1)
        return [keys] if self.shares_values else [keys, take_rows(self.v[:, heads], rows)]

    def values_of(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of what `take` gives."""
        return taken[0][..., : self.v.shape[-1]] if self.shares_values else taken[1]

    @property
    def num_slots(self) -> int:
        """Number of slots that all of the pools have."""
        return min(len(pool) for pool in (self.k, self.v, self.k_rope) if pool is not None)

    @property
    def kv_dims(self) -> list[int]:
        """The last dimension of each tensor that `take` gives."""
        keys = self.k.shape[-1] + (0 if self.k_rope is None else self.k_rope.shape[-1])
        return [keys] if self.shares_values else [keys, self.v.shape[-1]]

    @property
    def head_bytes(self) -> int:
        """Bytes of a key and its value in one KV head."""
        return sum(self.kv_dims) * self.k.element_size()


def slots_of(call: str, name: str, cache: torch.Tensor) -> torch.Tensor:
    """A cache as [num_slots, num_kv_heads, dim]."""
    if cache.ndim not in (3, 4) or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.{call}: {name} must be contiguous, [num_slots, num_kv_heads, dim] or "
            f"in pages of these, got shape {list(cache.shape)}, strides {list(cache.stride())}"
        )
    return cache.view(-1, *cache.shape[-2:])
