# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of a rank whose pool has a share of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...distributed import ContextParallel, ContextParallelPlan
from ...kv.mha import MHATokenToKVPool
from ...scheduling.scheduler import Batch
from ...sparse.cp_indexer import cp_indexer_topk
from ..dense.baseline import make_segments
from ..dense.whole_pages import WholePages
from ..phases import PhaseClock
from .attention import split_norm
from .baseline import attend_chosen, choose_keys
from .model import DsaConfig, SparseInputs
from .pools import row_runs


class ShardedSparseAttention:
    """`ContextParallel.attend_sparse` of one rank (`SparseOperators`), all of it one phase.

    The pool has rows of latents as keys, and keys of the indexer as values.
    """

    def __init__(
        self, config: DsaConfig, cp: ContextParallel, num_pages: int, layers: range
    ) -> None:
        self._config = config
        self._cp = cp
        (self._layer,) = layers
        self.pool = MHATokenToKVPool(
            size=num_pages * cp.page_size,
            page_size=cp.page_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=config.latent_dim,
            v_head_dim=config.index_head_dim,
            dtype=config.dtype,
            start_layer=self._layer,
            use_fia=False,
            container="torch",
        )
        for buffer in self.pool.get_kv_buffer(self._layer):
            buffer.fill_(torch.nan)  # whatever reads a slot before it is written is found out

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Take up a batch; its call follows."""
        self._batch, self._plan, self._clock = batch, plan, clock
        self._chosen: Tensor | None = None

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SparseOperators`."""
        return split_norm(self._config, x, q_weight, kv_weight, under_cp=self._cp.cp_size > 1)

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`."""
        c, plan = self._config, self._plan
        latents, index_k = self.pool.get_kv_buffer(layer)
        with self._clock("gather"):
            self._cp.write_kv(plan, inputs.latent, inputs.index_k[:, None], latents, index_k)
        with self._clock("attention"):
            out: Tensor = self._cp.attend_sparse(
                plan,
                inputs.q,
                latents,
                inputs.index_q,
                index_k,
                inputs.index_weights,
                topk=c.topk,
                sm_scale=c.scale,
                d_v=c.kv_lora_rank,
            )
        self._call = inputs, out
        return out

    @property
    def exchange(self) -> str:
        """Exchange of this batch: how its queries and keys met."""
        c = self._config
        chosen = self._cp.choose_sparse_exchange(
            self._plan,
            topk=c.topk,
            num_heads=c.num_heads,
            num_index_heads=c.index_heads,
            head_dim=c.latent_dim,
            d_v=c.kv_lora_rank,
            index_head_dim=c.index_head_dim,
            element_bytes=c.torch_dtype.itemsize,
            index_element_bytes=c.torch_dtype.itemsize,
        )
        return chosen.exchange if self._cp.exchange == "auto" else self._cp.exchange

    @property
    def chosen(self) -> Tensor:
        """The positions [rows, topk] that the indexer chooses among all keys in one place.

        Those that `attend` took, or the check finds attention to other keys wrong. Asked for by all
        ranks, which gather the keys.
        """
        if self._chosen is None:
            inputs, _ = self._call
            whole = self._whole_pages()
            self._chosen = cp_indexer_topk(
                inputs.index_q,
                whole.get_kv_buffer(self._layer)[1],
                inputs.index_weights,
                self._plan.metadata,
                block_tables=whole.tables,
                page_size=whole.page_size,
                topk=self._config.topk,
                sorted=False,
            )
        return self._chosen

    def error_over_codes(self, rows: Any) -> None:
        """Return None: there are no codes."""

    def flops(self) -> dict[str, int]:
        """Useful work of the batch on this rank, two flops for a multiplication and an addition."""
        c = self._config
        lens = self._plan.metadata.query_cache_lengths.astype(np.int64)
        chosen = int(np.minimum(lens, c.topk).sum())
        indexer = 2 * int(lens.sum()) * c.index_heads * c.index_head_dim
        return {
            "attention": indexer + 2 * chosen * c.num_heads * (c.latent_dim + c.kv_lora_rank),
        }

    def baseline(self) -> tuple[dict[str, float], float]:
        """Seconds of the same by torch, which gathers keys first, and how far apart results are."""
        c, plan = self._config, self._plan
        inputs, out = self._call
        clock = PhaseClock()
        with clock("attention"):
            whole = self._whole_pages()
            metadata: Any = plan.metadata
            segments = make_segments(
                metadata.query_request_indices,
                metadata.query_cache_lengths,
                whole.tables,
                plan.page_size,
                stride=self._cp.cp_size if metadata.strategy == "interleave" else 1,
                masks=False,
            )
            latents, index_k = (x.flatten(0, 2) for x in whole.get_kv_buffer(self._layer))
        choose_keys(
            inputs.index_q,
            inputs.index_weights.to(inputs.q.dtype),
            segments,
            lambda slots: index_k[slots],
            c.topk,
            clock,
        )
        slots = row_runs(self._batch, plan, whole.tables).slots(self.chosen)
        with clock("attention"):
            other = attend_chosen(
                inputs.q, slots, lambda slots: latents[slots], v_dim=c.kv_lora_rank, scale=c.scale
            )
        difference = float((out - other).abs().max()) if len(out) else 0.0
        return {"attention": sum(clock.seconds.values())}, difference

    def _whole_pages(self) -> WholePages:
        return WholePages(self._cp, self.pool, self._batch).of_layer(self._layer)
