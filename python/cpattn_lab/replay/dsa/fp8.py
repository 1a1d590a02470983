# SPDX-License-Identifier: Apache-2.0
"""Rows of a sparse model in its FP8 pool, and attention over them.

Before queries and keys of the indexer are quantised, a Hadamard transform spreads outliers; it does
not change the products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn.context_parallel.forward_mode import ForwardMode
from cpattn.distributed import ContextParallelPlan
from cpattn.scheduling.scheduler import Batch
from cpattn.sparse.dsa_metadata import build_dsa_metadata
from cpattn.sparse.index_k import hadamard_transform, quantize_index
from cpattn.sparse.kv_rows import dequantize_kv_rows, quantize_kv_rows
from cpattn.sparse.sparse_mla import flash_mla_sparse_fwd
from cpattn.sparse.topk import TopkTransformMethod, get_topk_transform_method

from .model import DsaConfig, SparseInputs
from .pools import RowRuns


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of keys or queries of the indexer, and their scales."""
    return quantize_index(hadamard_transform(x, x.shape[-1] ** -0.5))


class Fp8Pools:
    """A `DSATokenToKVPool`: latent rows of 656 bytes, and pages of keys of the indexer."""

    def __init__(self, config: DsaConfig, pool: Any) -> None:
        self._config, self.pool, self._layer = config, pool, pool.start_layer
        self.kv: Tensor = self.pool.get_key_buffer(self._layer).flatten(0, 1)
        self.index_k: Tensor = self.pool.get_index_k_buffer(self._layer)

    def begin(
        self, runs: RowRuns, batch: Batch | None = None, plan: ContextParallelPlan | None = None
    ) -> None:
        """Begin a batch, or without the last two arguments a decode step; its calls follow."""
        self._runs = runs
        method = get_topk_transform_method(
            ForwardMode.EXTEND if batch else ForwardMode.DECODE,
            fp8_kv_cache=True,
            prefill_impl=self._config.prefill_impl,
        )
        self._ragged = method == TopkTransformMethod.RAGGED
        if self._ragged:
            assert batch
            assert plan
            self._offset, self._flat_slots = self._flatten(batch, plan)

    def rows(self, inputs: SparseInputs) -> Tensor:
        """Return the rows [tokens, width] of new tokens, quantised, as ranks exchange them."""
        c = self._config
        nope, rope = inputs.latent.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        codes, scale = quantised(inputs.index_k)
        parts = quantize_kv_rows(nope, rope)[:, 0], codes, scale
        return torch.cat([part.view(torch.uint8) for part in parts], -1)

    def write(self, slots: Any, rows: Tensor) -> None:
        """Write rows of new tokens."""
        latent, codes, scale = rows.split([656, self._config.index_head_dim, 4], -1)
        scale = scale.contiguous().view(torch.float32)
        self.pool.set_kv_buffer(self._layer, slots, latent)
        self.pool.set_index_k_buffer(self._layer, slots, codes.contiguous(), scale)

    def index_queries(self, inputs: SparseInputs) -> tuple[Tensor, Tensor]:
        """Return codes of the queries, and weights times their scales."""
        codes, scale = quantised(inputs.index_q)
        return codes, inputs.index_weights * scale[..., 0]

    def indices(self, chosen: Tensor) -> Tensor:
        """Return chosen positions as `attend` takes them: slots (PAGED) or rows of `_flatten`."""
        if self._ragged:
            return torch.where(chosen >= 0, chosen + self._offset, -1)
        return self._runs.slots(chosen)

    def attend(self, q: Tensor, indices: Tensor) -> Tensor:
        """Return latent outputs [rows, heads, kv_lora_rank]."""
        c = self._config
        kv = dequantize_kv_rows(self.kv, self._flat_slots) if self._ragged else self.kv
        out: Tensor = flash_mla_sparse_fwd(q, kv, indices, c.scale, d_v=c.kv_lora_rank)[0]
        return out

    def _flatten(
        self, batch: Batch, plan: ContextParallelPlan
    ) -> tuple[Tensor, npt.NDArray[np.int32]]:
        """Place the keys of all sequences one after the other (RAGGED).

        Returns the first key of the sequence of each row [rows, 1], and the slots of all [keys].
        """
        position = np.arange(max(batch.seq_lens))
        pages = plan.block_tables[:, position // plan.page_size].clip(0)
        metadata = build_dsa_metadata(
            batch.extend_lens,
            batch.seq_lens,
            forward_mode=ForwardMode.EXTEND,
            topk=self._config.topk,
            fp8_kv_cache=True,
            prefill_impl=self._config.prefill_impl,
            req_to_token=pages * plan.page_size + position % plan.page_size,
            cp_metadata=plan.metadata,
        )
        # This equals page_table_1_flattened, but also exists for a batch without prefixes.
        used = np.arange(metadata.max_seqlen_k) < metadata.cache_seqlens[:, None]
        assert metadata.page_table_1 is not None
        offset = torch.tensor(metadata.topk_indices_offset)[:, None]
        return offset, metadata.page_table_1[used]

    def read_kv(self, slots: Tensor) -> Tensor:
        """Return latent rows [n, latent_dim], read by torch."""
        rows = self.kv[slots, 0]
        nope, scale, rope = rows.split([512, 16, 128], -1)
        groups = nope.view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
        latent = groups * scale.contiguous().view(torch.float32)[..., None]
        latent = latent.flatten(-2).bfloat16()
        return torch.cat([latent, rope.contiguous().view(torch.bfloat16)], -1)

    def read_index_k(self, slots: Tensor) -> Tensor:
        """Return keys of the indexer [n, index_head_dim], read by torch."""
        dim = self._config.index_head_dim
        codes, scale = self.index_k.split([self.pool.page_size * dim, self.pool.page_size * 4], -1)
        keys = codes.unflatten(-1, (-1, dim)).flatten(0, 1)[slots].view(torch.float8_e4m3fn)
        scales = scale.contiguous().view(torch.float32).flatten()[slots]
        return (keys.float() * scales[:, None]).bfloat16()
