# SPDX-License-Identifier: Apache-2.0
"""Dense attention of a rank: its K and V pools, and the calls over them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn import _core
from cpattn.distributed import ContextParallel, ContextParallelPlan
from cpattn.distributed.layers.choice import choose
from cpattn.distributed.plans.sharded_plan import ShardedPlan
from cpattn.kv.mha import MHATokenToKVPool
from cpattn.scheduling.scheduler import Batch

from ..phases import PhaseClock
from ..pools import make_nan_pool
from .baseline import gathered_attention, segments_of
from .codes import error_over_codes, numbers_of, scales_of
from .model import DenseConfig
from .whole_pages import WholePages


def make_pool(config: DenseConfig, num_pages: int, page_size: int, layers: range) -> Any:
    """Make the pool of a rank, or of a decode process."""
    return make_nan_pool(
        MHATokenToKVPool,
        num_pages,
        page_size,
        layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=config.pool_dtype,
        scale_dtype=config.scale_dtype,
        use_fia=False,
    )


class DenseAttention:
    """Paged attention of one rank; called by the layers of a `Decoder`.

    `num_pages` counts this rank's pool, which has all keys or, with a placement, its share.
    """

    def __init__(
        self, config: DenseConfig, cp: ContextParallel, num_pages: int, layers: range
    ) -> None:
        self._config = config
        self._cp = cp
        self._scale = config.head_dim**-0.5
        self._layers = layers
        self.pool = make_pool(config, num_pages, cp.page_size, layers)

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Begin a batch; its calls follow, one per layer."""
        self._batch, self._plan, self._clock = batch, plan, clock
        self._calls: list[tuple[Tensor, Tensor]] = []  # q and output of each layer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches = self.pool.get_kv_buffer(layer)
        with self._clock("gather"):
            if self._config.has_codes:
                self._write_codes(layer, k, v)
            else:
                self._cp.write_kv(self._plan, k, v, *caches)
        with self._clock("attention"):
            scales = scales_of(self.pool, layer)
            out: Tensor = self._cp.attend(self._plan, q, *caches, scale=self._scale, **scales)
        self._calls.append((q, out))
        return out

    def _write_codes(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Exchange unconverted rows; every rank makes the same codes of them."""
        k, v = self._cp.gather(self._plan, torch.stack([k, v], 1)).unbind(1)
        slots: Any = self._plan.slots
        if self._cp.placement is not None:
            kept, slots = self._cp.placement.filter_local(slots, self._cp.cp_rank)
            k, v = k[torch.from_numpy(kept)], v[torch.from_numpy(kept)]
        self.pool.set_kv_buffer(layer, slots, k, v)

    @property
    def exchange(self) -> str:
        """Exchange of queries and keys in this batch."""
        plan, config = self._plan, self._config
        if not isinstance(plan, ShardedPlan):
            return "gather"
        if plan.exchange != "auto":
            return plan.exchange
        if config.scale_dtype:
            return "pass_q"  # other exchanges have no scales of each token
        query = config.head_dim * config.torch_dtype.itemsize
        key = 2 * config.head_dim * getattr(torch, config.pool_dtype).itemsize
        sizes = _core.LayerBytes(
            config.num_heads, config.num_kv_heads, query, key, query, config.head_dim
        )
        return choose(plan, sizes).exchange

    def _whole_pages(self) -> WholePages | None:
        """Gather the batch's pages, if they lie on several ranks."""
        if self._cp.placement is None:
            return None
        return WholePages(self._cp, self.pool, self._batch)

    def error_over_codes(self, rows: npt.NDArray[Any]) -> float | None:
        """Return the largest error of this rank's `rows` over all layers; None without codes."""
        if not self._config.has_codes:
            return None
        plan: Any = self._plan
        numbers = self._cp.shard(plan, torch.arange(self._batch.num_tokens)).numpy()
        mine = np.flatnonzero(np.isin(numbers[: plan.num_local_rows], rows))
        whole = self._whole_pages()
        tables = plan.block_tables if whole is None else whole.tables
        tables = tables[plan.metadata.query_request_indices[mine]]
        lens = plan.metadata.query_cache_lengths[mine]
        errors = []
        for layer, (q, out) in zip(self._layers, self._calls, strict=True):
            pool = self.pool if whole is None else whole.of_layer(layer)
            errors.append(
                error_over_codes(self._config, pool, layer, q[mine], out[mine], tables, lens)
            )
        return max(errors)

    @property
    def chosen(self) -> None:
        """Return no keys, as dense attention chooses none."""

    def flops(self) -> dict[str, int]:
        """Return the useful work on this rank: two products of head_dim per pair and head."""
        c = self._config
        pairs = int(np.sum(self._plan.metadata.query_cache_lengths, dtype=np.int64))
        return {"attention": 4 * pairs * c.num_heads * c.head_dim * len(self._layers)}

    def baseline(self) -> tuple[dict[str, float], float]:
        """Return seconds of the same attention by torch, by phase, and the distance of results.

        If keys lie on several ranks, torch gathers them first, like the attention that is timed.
        """
        whole = self._whole_pages()
        tables = self._batch.block_tables if whole is None else whole.tables
        segments = segments_of(self._plan, tables)
        seconds, difference = 0.0, 0.0
        for layer, (q, out) in zip(self._layers, self._calls, strict=True):
            start = time.perf_counter()
            pool: Any = self.pool if whole is None else whole.of_layer(layer)
            fetched = time.perf_counter() - start
            if self._config.has_codes:
                caches = tuple(x.to(q.dtype) for x in numbers_of(pool, layer))
            else:
                caches = pool.get_kv_buffer(layer)
            k_cache, v_cache = (cache.flatten(0, 1) for cache in caches)
            start = time.perf_counter() - fetched
            other = gathered_attention(q, k_cache, v_cache, segments, scale=self._scale)
            seconds += time.perf_counter() - start
            if len(out):
                difference = max(difference, float((out - other).abs().max()))
        return {"attention": seconds}, difference
