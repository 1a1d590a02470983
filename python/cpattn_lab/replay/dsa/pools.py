# SPDX-License-Identifier: Apache-2.0
"""Pools of a sparse model, and attention over pools in the dtype of the model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn.distributed import ContextParallelPlan
from cpattn.kv.dsa import DSATokenToKVPool
from cpattn.kv.mla import MLATokenToKVPool
from cpattn.npu.sparse_flash_attention import npu_sparse_flash_attention
from cpattn.scheduling.scheduler import Batch
from cpattn.sparse.cp_indexer import cp_indexer_topk
from cpattn.sparse.sglang_0_5_23 import transform_index_page_table_prefill

from ..pools import make_nan_pool
from .model import DsaConfig, SparseInputs


class RowRuns(NamedTuple):
    """Runs of a rank's adjacent rows of one sequence; a sequence has up to two runs."""

    lens: npt.NDArray[np.int64]  # [runs]
    tables: npt.NDArray[np.int32]  # [runs, pages]: pages of their sequences
    kv_lens: npt.NDArray[np.int64]  # [runs]: keys of their sequences, up to the last new token
    page_size: int

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots of positions [rows, topk] in the sequences of the rows; -1 stays -1."""
        return transform_index_page_table_prefill(
            torch.from_numpy(self.tables), positions, self.lens, self.page_size
        )


def row_runs(batch: Batch, plan: ContextParallelPlan, tables: Any = None) -> RowRuns:
    """Return the runs of a rank's rows, in order; `tables` replaces the plan's block tables."""
    requests = plan.metadata.query_request_indices
    starts = np.flatnonzero(np.diff(requests, prepend=-1))
    sequences = requests[starts]
    return RowRuns(
        np.diff(np.append(starts, len(requests))),
        (plan.block_tables if tables is None else tables)[sequences],
        np.array(batch.seq_lens, np.int64)[sequences],
        plan.page_size,
    )


def make_pool(config: DsaConfig, num_pages: int, page_size: int, layers: range) -> Any:
    """Make the pool of a rank with all keys, or of a decode process."""
    index_head_dim = config.index_head_dim
    if config.kv_dtype == "fp8":
        return make_nan_pool(
            DSATokenToKVPool, num_pages, page_size, layers, index_head_dim=index_head_dim
        )
    return make_nan_pool(
        MLATokenToKVPool,
        num_pages,
        page_size,
        layers,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        index_head_dim=index_head_dim,
        dtype=config.dtype,
    )


def choose_positions(
    config: DsaConfig,
    queries: tuple[Tensor, Tensor],
    index_k: Tensor,
    metadata: Any,
    *,
    block_tables: npt.NDArray[np.int32],
    page_size: int,
) -> Tensor:
    """Return the positions [rows, topk] of the keys that the indexer chooses."""
    index_q, weights = queries
    return cp_indexer_topk(
        index_q,
        index_k,
        weights,
        metadata,
        block_tables=block_tables,
        page_size=page_size,
        topk=config.topk,
        sorted=False,
    )


class PlainPools:
    """An `MLATokenToKVPool`: latent rows, their rotary part, and keys of the indexer."""

    def __init__(self, config: DsaConfig, pool: Any) -> None:
        self._config, self.pool, self._layer = config, pool, pool.start_layer

    @property
    def index_k(self) -> Tensor:
        """Keys of the indexer as `cp_indexer_topk` takes them."""
        keys: Tensor = self.pool.get_index_k_buffer(self._layer)
        return keys

    def begin(
        self, runs: RowRuns, batch: Batch | None = None, plan: ContextParallelPlan | None = None
    ) -> None:
        """Begin a batch, or without the last two arguments a decode step; its calls follow."""
        self._runs = runs

    def rows(self, inputs: SparseInputs) -> Tensor:
        """Return the rows [tokens, width] of new tokens as ranks exchange them."""
        return torch.cat([inputs.latent[:, 0], inputs.index_k], -1)

    def write(self, slots: Any, rows: Tensor) -> None:
        """Write rows of new tokens."""
        latent, index_k = rows.split([self._config.latent_dim, self._config.index_head_dim], -1)
        self.pool.set_kv_buffer(self._layer, slots, latent)
        self.pool.set_index_k_buffer(self._layer, slots, index_k)

    def index_queries(self, inputs: SparseInputs) -> tuple[Tensor, Tensor]:
        """Return queries and weights for the keys as stored."""
        return inputs.index_q, inputs.index_weights

    def indices(self, chosen: Tensor) -> Tensor:
        """Return chosen positions as `attend` takes them: unchanged."""
        return chosen

    def attend(self, q: Tensor, indices: Tensor) -> Tensor:
        """Return latent outputs [rows, heads, kv_lora_rank]."""
        c, runs = self._config, self._runs
        q, q_rope = q.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latent, rope = self.pool.get_kv_buffer(self._layer)
        out: Any = npu_sparse_flash_attention(
            q,
            latent,
            latent,
            indices[:, None],
            c.scale,
            block_table=runs.tables,
            actual_seq_lengths_query=np.cumsum(runs.lens),
            actual_seq_lengths_kv=runs.kv_lens,
            query_rope=q_rope,
            key_rope=rope,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=0,  # no mask: the indexer chose no later position
            attention_mode=2,
        )[0]
        return out

    def read_kv(self, slots: Tensor) -> Tensor:
        """Return latent rows with their rotary part [n, latent_dim], read by torch."""
        parts = self.pool.get_kv_buffer(self._layer)
        return torch.cat([part.flatten(0, 2)[slots] for part in parts], -1)

    def read_index_k(self, slots: Tensor) -> Tensor:
        """Return keys of the indexer [n, index_head_dim], read by torch."""
        return self.index_k.flatten(0, 2)[slots]
