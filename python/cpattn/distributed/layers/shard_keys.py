# SPDX-License-Identifier: Apache-2.0
"""Keys and values that a rank holds of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rows import take_rows


@dataclass(frozen=True)
class ShardKeys:
    """Checked keys and values of a layer in this rank's pools."""

    k: torch.Tensor  # [slots, num_kv_heads, head_dim]
    v: torch.Tensor  # [slots, num_kv_heads, v_head_dim]; may be part of the keys
    k_rope: torch.Tensor | None  # the last dimensions of the keys, if separate
    shares_values: bool  # values are a part of the keys

    def take(self, rows: torch.Tensor, heads: slice = slice(None)) -> list[torch.Tensor]:
        """Return copies of keys, and of values unless part of the keys: [rows, heads, dim]."""
        keys = take_rows(self.k[:, heads], rows)
        if self.k_rope is not None:
            keys = torch.cat([keys, take_rows(self.k_rope[:, heads], rows)], dim=-1)
        return [keys] if self.shares_values else [keys, take_rows(self.v[:, heads], rows)]

    def values_of(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values in the result of `take`."""
        return taken[0][..., : self.v.shape[-1]] if self.shares_values else taken[1]

    @property
    def num_slots(self) -> int:
        """Number of slots in all of the pools."""
        return min(len(pool) for pool in (self.k, self.v, self.k_rope) if pool is not None)

    @property
    def kv_dims(self) -> list[int]:
        """Last dimension of each tensor in the result of `take`."""
        keys = self.k.shape[-1] + (0 if self.k_rope is None else self.k_rope.shape[-1])
        return [keys] if self.shares_values else [keys, self.v.shape[-1]]

    @property
    def head_bytes(self) -> int:
        """Bytes of a key and its value in one KV head."""
        return sum(self.kv_dims) * self.k.element_size()


def slots_of(call: str, name: str, cache: torch.Tensor) -> torch.Tensor:
    """Return a cache as [num_slots, num_kv_heads, dim]."""
    if cache.ndim not in (3, 4) or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.{call}: {name} must be contiguous, [num_slots, num_kv_heads, dim] or "
            f"in pages of these, got shape {list(cache.shape)}, strides {list(cache.stride())}"
        )
    return cache.view(-1, *cache.shape[-2:])
