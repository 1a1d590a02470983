# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of a rank: its pools, and the calls over them."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from cpattn.context_parallel.forward_mode import ForwardMode
from cpattn.distributed import ContextParallel, ContextParallelPlan
from cpattn.scheduling.scheduler import Batch
from cpattn.sparse.gates import dsa_use_prefill_cp
from cpattn.sparse.split_norm import can_fuse_split_qk_norm, fused_split_qk_norm, split_qk_norm

from ..dense.baseline import Segment, segments_of
from ..phases import PhaseClock
from .baseline import Load, attend_chosen, choose_keys
from .fp8 import Fp8Pools
from .model import EPS, DsaConfig, SparseInputs
from .pools import PlainPools, choose_positions, make_pool, row_runs


class SplitNorm:
    """`SparseOperators.split_norm` of the library, fused if possible.

    Context parallelism, which gathers the latents, excludes the fused form.
    """

    _under_cp = False

    def __init__(self, config: DsaConfig) -> None:
        self._config = config

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SparseOperators`."""
        c = self._config
        sizes = c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim
        if can_fuse_split_qk_norm(len(x), neox_rope=False, uses_prefill_cp=self._under_cp):
            return fused_split_qk_norm(x, q_weight, kv_weight, *sizes, eps=EPS)
        q, latent, rope, _ = split_qk_norm(x, q_weight, kv_weight, *sizes, q_eps=EPS, kv_eps=EPS)
        return q, latent, rope


class RankAttention(SplitNorm):
    """Common part of attention in ranks with all keys and in ranks with a share of them."""

    _call: tuple[SparseInputs, Tensor]  # inputs and output of the batch

    def __init__(self, config: DsaConfig, cp: ContextParallel) -> None:
        super().__init__(config)
        self._cp = cp
        self._under_cp = dsa_use_prefill_cp(
            ForwardMode.EXTEND, has_cp_metadata=True, enabled=cp.cp_size > 1
        )

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Take up a batch; its call follows."""
        self._batch, self._plan, self._clock = batch, plan, clock

    def error_over_codes(self, rows: Any) -> None:
        """Return None: the check treats FP8 rows like other rows."""

    def flops(self) -> dict[str, int]:
        """Return useful flops of the batch on this rank; a multiply-add counts as two."""
        c = self._config
        lens = self._plan.metadata.query_cache_lengths.astype(np.int64)
        chosen = int(np.minimum(lens, c.topk).sum())
        return {
            "indexer": 2 * int(lens.sum()) * c.index_heads * c.index_head_dim,
            "attention": 2 * chosen * c.num_heads * (c.latent_dim + c.kv_lora_rank),
        }

    def _difference(
        self,
        clock: PhaseClock,
        segments: list[Segment],
        queries: tuple[Tensor, Tensor],
        loads: tuple[Load, Load],
        slots: Tensor,
    ) -> float:
        """Choose keys and attend by torch; return the largest difference of the outputs.

        queries : queries and weights of the indexer
        loads : functions that load keys of the indexer, and latent rows, at pool rows
        slots : pool rows [rows, topk] that the library's attention reads
        """
        c, (inputs, out) = self._config, self._call
        index_q, weights = (x.to(inputs.q.dtype) for x in queries)
        load_keys, load_rows = loads
        choose_keys(index_q, weights, segments, load_keys, c.topk, clock)
        with clock("attention"):
            other = attend_chosen(inputs.q, slots, load_rows, v_dim=c.kv_lora_rank, scale=c.scale)
        return float((out - other).abs().max()) if len(out) else 0.0


def make_pools(config: DsaConfig, pool: Any) -> PlainPools | Fp8Pools:
    """Return the calls over a pool of `make_pool`."""
    return Fp8Pools(config, pool) if config.kv_dtype == "fp8" else PlainPools(config, pool)


class SparseAttention(RankAttention):
    """`SparseOperators` of one rank: split, indexer, choice of keys and latent attention."""

    def __init__(
        self, config: DsaConfig, cp: ContextParallel, num_pages: int, layers: range
    ) -> None:
        super().__init__(config, cp)
        assert len(layers) == 1
        self.pool = make_pool(config, num_pages, cp.page_size, layers)
        self._pools = make_pools(config, self.pool)

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Take up a batch; its call follows."""
        super().begin(batch, plan, clock)
        self._runs = row_runs(batch, plan)
        self._pools.begin(self._runs, batch, plan)

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`; the chosen positions [rows, topk] stay in ``chosen``."""
        plan, pools = self._plan, self._pools
        with self._clock("gather"):
            pools.write(plan.slots, self._cp.gather(plan, pools.rows(inputs)))
        with self._clock("indexer"):
            self.chosen = choose_positions(
                self._config,
                pools.index_queries(inputs),
                pools.index_k,
                plan.metadata,
                block_tables=plan.block_tables,
                page_size=plan.page_size,
            )
        with self._clock("top-k"):
            indices = pools.indices(self.chosen)
        with self._clock("attention"):
            out = pools.attend(inputs.q, indices)
        self._call = inputs, out
        return out

    @property
    def exchange(self) -> str:
        """Exchange of this batch: how its queries and keys met."""
        return "gather"

    def baseline(self) -> tuple[dict[str, float], float]:
        """Return the seconds of torch by phase, and the largest difference of the outputs."""
        pools, clock = self._pools, PhaseClock()
        difference = self._difference(
            clock,
            segments_of(self._plan, self._batch.block_tables, masks=False),
            pools.index_queries(self._call[0]),
            (pools.read_index_k, pools.read_kv),
            self._runs.slots(self.chosen),
        )
        return {phase: clock.seconds[phase] for phase in self._config.attention_phases}, difference
