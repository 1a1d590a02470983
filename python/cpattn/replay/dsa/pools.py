# SPDX-License-Identifier: Apache-2.0
"""The pool of a sparse model in the dtype of the model, and attention over it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...distributed import ContextParallel, ContextParallelPlan
from ...kv.mla import MLATokenToKVPool
from ...npu.sparse_flash_attention import npu_sparse_flash_attention
from ...scheduling.scheduler import Batch
from ...sparse.sglang_0_5_23 import transform_index_page_table_prefill
from .model import DsaConfig, SparseInputs


class RowRuns(NamedTuple):
    """Runs of rows of the same sequence, of which a rank has up to two for each."""

    lens: npt.NDArray[np.int64]  # [runs]
    tables: npt.NDArray[np.int32]  # [runs, pages]: of their sequences
    kv_lens: npt.NDArray[np.int64]  # [runs]: of their sequences, up to the last new token
    page_size: int

    def slots(self, positions: Tensor) -> Tensor:
        """Return the slots of positions [rows, topk] in the sequences of the rows; -1 stays."""
        return transform_index_page_table_prefill(
            torch.from_numpy(self.tables), positions, self.lens, self.page_size
        )


def row_runs(batch: Batch, plan: ContextParallelPlan, tables: Any = None) -> RowRuns:
    """The runs of a rank's rows, in their order; of sequences with the plan's pages, or others."""
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
    """A pool of pages 1 ... num_pages, and page 0 for padded tokens, of some of the layers.

    It starts as NaN: whatever reads a slot before it is written is found out.
    """
    pool = MLATokenToKVPool(
        size=num_pages * page_size,
        page_size=page_size,
        num_layers=len(layers),
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        index_head_dim=config.index_head_dim,
        dtype=config.dtype,
        start_layer=layers.start,
        container="torch",
    )
    for layer in layers:
        for buffer in (*pool.get_kv_buffer(layer), pool.get_index_k_buffer(layer)):
            buffer.fill_(torch.nan)
    return pool


def attend_paged(
    config: DsaConfig, pool: Any, layer: int, q: Tensor, chosen: Tensor, runs: RowRuns
) -> Tensor:
    """Attention [rows, heads, kv_lora_rank] of q to the chosen positions of its sequences."""
    q, q_rope = q.split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
    latent, rope = pool.get_kv_buffer(layer)
    out: Any = npu_sparse_flash_attention(
        q,
        latent,
        latent,
        chosen[:, None],
        config.scale,
        block_table=runs.tables,
        actual_seq_lengths_query=np.cumsum(runs.lens),
        actual_seq_lengths_kv=runs.kv_lens,
        query_rope=q_rope,
        key_rope=rope,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=0,  # nothing more to hide: the indexer chose no later position
        attention_mode=2,
    )[0]
    return out


class PlainPools:
    """An `MLATokenToKVPool`: latent rows, their rotary part, and keys of the indexer."""

    def __init__(self, config: DsaConfig, num_pages: int, page_size: int, layers: range) -> None:
        self._config = config
        self._layer = layers.start
        self.pool = make_pool(config, num_pages, page_size, layers)

    @property
    def index_k(self) -> Tensor:
        """Keys of the indexer as `cp_indexer_topk` takes them."""
        keys: Tensor = self.pool.get_index_k_buffer(self._layer)
        return keys

    def begin(self, batch: Batch, plan: ContextParallelPlan, runs: RowRuns) -> None:
        """Take up a batch; its calls follow."""
        self._runs = runs

    def write(self, cp: ContextParallel, plan: ContextParallelPlan, inputs: SparseInputs) -> None:
        """Exchange the rows of the new tokens, and write those of all ranks."""
        rows = cp.gather(plan, torch.cat([inputs.latent[:, 0], inputs.index_k], -1))
        latent, index_k = rows.split([self._config.latent_dim, self._config.index_head_dim], -1)
        self.pool.set_kv_buffer(self._layer, plan.slots, latent)
        self.pool.set_index_k_buffer(self._layer, plan.slots, index_k)

    def index_queries(self, inputs: SparseInputs) -> tuple[Tensor, Tensor]:
        """Queries and weights for the keys as they are stored."""
        return inputs.index_q, inputs.index_weights

    def indices(self, chosen: Tensor) -> Tensor:
        """Return what `attend` takes for chosen positions: the positions."""
        return chosen

    def attend(self, q: Tensor, indices: Tensor) -> Tensor:
        """Latent outputs [rows, heads, kv_lora_rank]."""
        return attend_paged(self._config, self.pool, self._layer, q, indices, self._runs)

    def read_kv(self, slots: Tensor) -> Tensor:
        """Latent rows with their rotary part [n, latent_dim], by torch."""
        parts = self.pool.get_kv_buffer(self._layer)
        return torch.cat([part.flatten(0, 2)[slots] for part in parts], -1)

    def read_index_k(self, slots: Tensor) -> Tensor:
        """Keys of the indexer [n, index_head_dim], by torch."""
        return self.index_k.flatten(0, 2)[slots]
