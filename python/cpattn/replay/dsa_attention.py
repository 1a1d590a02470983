# SPDX-License-Identifier: Apache-2.0
"""What a rank does for sparse attention: its pools, and the calls over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import cpattn
from cpattn import ForwardMode, TopkTransformMethod
from cpattn.distributed import ContextParallel, ContextParallelPlan

from .baseline import make_segments
from .dsa_baseline import attend_chosen, choose_keys
from .dsa_model import EPS, DsaConfig, SparseInputs
from .dsa_pools import Fp8Pools, PlainPools
from .phases import PhaseClock
from .scheduler import Batch


class SparseAttention:
    """Split, indexer, choice of keys and latent attention of one rank (`SparseOperators`)."""

    def __init__(
        self, config: DsaConfig, cp: ContextParallel, num_pages: int, layers: range
    ) -> None:
        self._config = config
        self._cp = cp
        assert len(layers) == 1
        fp8 = config.kv_dtype == "fp8"
        self._pools = (Fp8Pools if fp8 else PlainPools)(config, num_pages + 1, cp.page_size)
        self._method = cpattn.get_topk_transform_method(
            ForwardMode.EXTEND, fp8_kv_cache=fp8, prefill_impl=config.prefill_impl
        )

    def begin(self, batch: Batch, plan: ContextParallelPlan, clock: PhaseClock) -> None:
        """Take up a batch; its call follows."""
        self._batch, self._plan, self._clock = batch, plan, clock
        self._to_slots = self._slot_transform()
        self._transform = self._to_slots
        if self._method == TopkTransformMethod.RAGGED:
            self._transform = self._row_transform()

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fused where it may be: not under context parallelism, which gathers the latents."""
        c = self._config
        sizes = c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim
        under_cp = cpattn.dsa_use_prefill_cp(
            ForwardMode.EXTEND, has_cp_metadata=True, enabled=self._cp.cp_size > 1
        )
        if cpattn.can_fuse_split_qk_norm(len(x), neox_rope=False, uses_prefill_cp=under_cp):
            return cpattn.fused_split_qk_norm(x, q_weight, kv_weight, *sizes, eps=EPS)
        q, latent, rope, _ = cpattn.split_qk_norm(
            x, q_weight, kv_weight, *sizes, q_eps=EPS, kv_eps=EPS
        )
        return q, latent, rope

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`; the chosen positions [rows, topk] stay in ``chosen``."""
        plan = self._plan
        with self._clock("gather"):
            self._pools.write(self._cp, plan, inputs)
        with self._clock("indexer"):
            index_q, weights = self._pools.index_queries(inputs)
            self.chosen: Tensor = cpattn.cp_indexer_topk(
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
            indices = self._transform(self.chosen)
        with self._clock("attention"):
            kv = self._pools.kv
            if self._method == TopkTransformMethod.RAGGED:
                kv = cpattn.dequantize_kv_rows(kv, self._flat_slots)
            out: Tensor = cpattn.flash_mla_sparse_fwd(
                inputs.q, kv, indices, self._config.scale, d_v=self._config.kv_lora_rank
            )[0]
        self._call = inputs, out
        return out

    def _slot_transform(self) -> Callable[[Tensor], Tensor]:
        """From positions to slots of the pool (PAGED)."""
        requests = self._plan.metadata.query_request_indices
        starts = np.flatnonzero(np.diff(requests, prepend=-1))
        table = torch.from_numpy(self._plan.block_tables[requests[starts]])
        lens = np.diff(np.append(starts, len(requests)))
        page_size = self._plan.page_size
        return lambda chosen: cpattn.transform_index_page_table_prefill(
            table, chosen, lens, page_size
        )

    def _row_transform(self) -> Callable[[Tensor], Tensor]:
        """From positions to rows of the keys of all sequences, one after the other (RAGGED)."""
        batch, plan = self._batch, self._plan
        position = np.arange(max(batch.seq_lens))
        pages = plan.block_tables[:, position // plan.page_size].clip(0)
        metadata = cpattn.build_dsa_metadata(
            batch.extend_lens,
            batch.seq_lens,
            forward_mode=ForwardMode.EXTEND,
            topk=self._config.topk,
            fp8_kv_cache=True,
            prefill_impl=self._config.prefill_impl,
            req_to_token=pages * plan.page_size + position % plan.page_size,
            cp_metadata=plan.metadata,
        )
        # As page_table_1_flattened, which is None without prefixes: the new keys are at hand then.
        used = np.arange(metadata.max_seqlen_k) < metadata.cache_seqlens[:, None]
        assert metadata.page_table_1 is not None
        self._flat_slots = metadata.page_table_1[used]
        offset = torch.tensor(metadata.topk_indices_offset)[:, None]
        return lambda chosen: torch.where(chosen >= 0, chosen + offset, -1)

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
        slots = self._to_slots(self.chosen)
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
