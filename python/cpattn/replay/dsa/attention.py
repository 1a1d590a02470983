# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of a rank: its pools, and the calls over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ...context_parallel.forward_mode import ForwardMode
from ...distributed import ContextParallel, ContextParallelPlan
from ...scheduling.scheduler import Batch
from ...sparse.cp_indexer import cp_indexer_topk
from ...sparse.gates import dsa_use_prefill_cp
from ...sparse.split_norm import can_fuse_split_qk_norm, fused_split_qk_norm, split_qk_norm
from ..dense.baseline import make_segments
from ..phases import PhaseClock
from .baseline import attend_chosen, choose_keys
from .fp8 import Fp8Pools
from .model import EPS, DsaConfig, SparseInputs
from .pools import PlainPools, row_runs


class SparseAttention:
    """Split, indexer, choice of keys and latent attention of one rank (`SparseOperators`)."""

    def __init__(
        self, config: DsaConfig, cp: ContextParallel, num_pages: int, layers: range
    ) -> None:
        self._config = config
        self._cp = cp
        assert len(layers) == 1
        self._pools: PlainPools | Fp8Pools
        if config.kv_dtype == "fp8":
            self._pools = Fp8Pools(config, num_pages, cp.page_size, layers)
        else:
            self._pools = PlainPools(config, num_pages, cp.page_size, layers)
        self.pool = self._pools.pool

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Take up a batch; its call follows."""
        self._batch, self._plan, self._clock = batch, plan, clock
        self._runs = row_runs(batch, plan)
        self._pools.begin(batch, plan, self._runs)

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SparseOperators`."""
        under_cp = dsa_use_prefill_cp(
            ForwardMode.EXTEND, has_cp_metadata=True, enabled=self._cp.cp_size > 1
        )
        return split_norm(self._config, x, q_weight, kv_weight, under_cp=under_cp)

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`; the chosen positions [rows, topk] stay in ``chosen``."""
        plan = self._plan
        with self._clock("gather"):
            self._pools.write(self._cp, plan, inputs)
        with self._clock("indexer"):
            index_q, weights = self._pools.index_queries(inputs)
            self.chosen: Tensor = cp_indexer_topk(
                index_q,
                self._pools.index_k,
                weights,
                plan.metadata,
                block_tables=plan.block_tables,
                page_size=plan.page_size,
                topk=self._config.topk,
                sorted=False,
            )
        with self._clock("top-k"):
            indices = self._pools.indices(self.chosen)
        with self._clock("attention"):
            out = self._pools.attend(inputs.q, indices)
        self._call = inputs, out
        return out

    @property
    def exchange(self) -> str:
        """Exchange of this batch: how its queries and keys met."""
        return "gather"

    def error_over_codes(self, rows: Any) -> None:
        """The check reads FP8 rows as others."""

    def flops(self) -> dict[str, int]:
        """Useful work of the batch on this rank, two flops for a multiplication and an addition."""
        c = self._config
        lens = self._plan.metadata.query_cache_lengths.astype(np.int64)
        chosen = int(np.minimum(lens, c.topk).sum())
        return {
            "indexer": 2 * int(lens.sum()) * c.index_heads * c.index_head_dim,
            "attention": 2 * chosen * c.num_heads * (c.latent_dim + c.kv_lora_rank),
        }

    def baseline(self) -> tuple[dict[str, float], float]:
        """Seconds of the same by torch, by phase, and how far apart attention is."""
        metadata: Any = self._plan.metadata
        segments = make_segments(
            metadata.query_request_indices,
            metadata.query_cache_lengths,
            self._batch.block_tables,
            self._plan.page_size,
            stride=self._cp.cp_size if metadata.strategy == "interleave" else 1,
            masks=False,
        )
        inputs, out = self._call
        index_q, weights = self._pools.index_queries(inputs)
        clock = PhaseClock()
        choose_keys(
            index_q.to(inputs.q.dtype),
            weights.to(inputs.q.dtype),
            segments,
            self._pools.read_index_k,
            self._config.topk,
            clock,
        )
        slots = self._runs.slots(self.chosen)
        with clock("attention"):
            other = attend_chosen(
                inputs.q,
                slots,
                self._pools.read_kv,
                v_dim=self._config.kv_lora_rank,
                scale=self._config.scale,
            )
        difference = float((out - other).abs().max()) if len(out) else 0.0
        return {phase: clock.seconds[phase] for phase in self._config.attention_phases}, difference


def split_norm(
    config: DsaConfig, x: Tensor, q_weight: Tensor, kv_weight: Tensor, *, under_cp: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused where it may be: not under context parallelism, which gathers the latents."""
    sizes = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    if can_fuse_split_qk_norm(len(x), neox_rope=False, uses_prefill_cp=under_cp):
        return fused_split_qk_norm(x, q_weight, kv_weight, *sizes, eps=EPS)
    q, latent, rope, _ = split_qk_norm(x, q_weight, kv_weight, *sizes, q_eps=EPS, kv_eps=EPS)
    return q, latent, rope
