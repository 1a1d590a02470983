# SPDX-License-Identifier: Apache-2.0
"""KV pools of a rank; layers with the same shape share a pool."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ....distributed import ContextParallel
from ....kv.buffers import KVPool, Memory, Rows
from .layers import LayerShape


class Pools:
    """Pools for all layers of a model, with `num_pages` pages each in addition to page 0."""

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        num_pages: int,
        page_size: int,
        memory: Memory | None,
    ) -> None:
        self.nbytes = 0
        self._caches: dict[int, tuple[Tensor, Tensor | None]] = {}
        for shape in dict.fromkeys(shapes.values()):
            layers = [layer for layer, other in shapes.items() if other == shape]
            dtype = str(shape.dtype).removeprefix("torch.")
            rows = {"k": Rows((shape.num_kv_heads, shape.head_dim), dtype)}
            if shape.v_head_dim:
                rows["v"] = Rows((shape.num_kv_heads, shape.v_head_dim), dtype)
            size = num_pages * page_size
            pool = KVPool(rows, size, page_size, len(layers), dtype, 0, False, "torch", memory)
            self.nbytes += pool.nbytes
            for index, layer in enumerate(layers):
                keys = pool.get_key_buffer(index)
                values = pool.get_value_buffer(index) if shape.v_head_dim else None
                self._caches[layer] = keys, values

    def caches(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return keys and values [num_pages, page_size, num_kv_heads, dim]; latents lack values."""
        return self._caches[layer]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Write rows of tokens to their slots."""
        for cache, rows in zip(self.caches(layer), (k, v), strict=True):
            if cache is not None and rows is not None:
                cache.flatten(0, 1).index_copy_(0, slots, rows)


def make_pools(
    cp: ContextParallel, shapes: dict[int, LayerShape], num_pages: int, *, shared: bool
) -> Pools:
    """Make the pools of this rank; all ranks make them at once, and learn of an error in one."""
    cp.topology()  # ranks of a host then meet in its memory
    memory = cp.shared_memory() if shared else None
    with torch.inference_mode(False), cp.agreement() if memory is None else nullcontext():
        return Pools(shapes, num_pages, cp.page_size, memory)
