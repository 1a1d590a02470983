# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of the decode process: one query of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...context_parallel.metadata import build_cp_metadata
from ...sparse.cp_indexer import cp_indexer_topk
from ...sparse.sparse_mla import flash_mla_sparse_fwd
from .attention import split_norm
from .fp8 import index_queries, make_fp8_pool, quantised
from .model import DsaConfig, SparseInputs
from .pools import RowRuns, attend_paged
from .pools import make_pool as make_plain_pool


def make_pool(config: DsaConfig, num_pages: int, page_size: int, layers: range) -> Any:
    """Make a pool like those of prefill ranks."""
    make = make_fp8_pool if config.kv_dtype == "fp8" else make_plain_pool
    return make(config, num_pages, page_size, layers)


class SparseDecodeAttention:
    """One step (`SparseOperators`): the new rows into the pool, then indexer and attention."""

    def __init__(
        self,
        config: DsaConfig,
        pool: Any,
        block_tables: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        self._config = config
        self._pool = pool
        self._slots = slots
        self._runs = RowRuns(np.ones_like(kv_lens), block_tables, kv_lens, pool.page_size)
        self._metadata = build_cp_metadata(
            self._runs.lens, kv_lens, cp_rank=0, cp_size=1, strategy="contiguous"
        )

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SparseOperators`."""
        return split_norm(self._config, x, q_weight, kv_weight, under_cp=False)

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`; the chosen positions [rows, topk] stay in ``chosen``."""
        pool, runs = self._pool, self._runs
        fp8 = self._config.kv_dtype == "fp8"
        pool.set_kv_buffer(layer, self._slots, inputs.latent)
        index_k = quantised(inputs.index_k) if fp8 else (inputs.index_k,)
        pool.set_index_k_buffer(layer, self._slots, *index_k)
        index_q, weights = index_queries(inputs) if fp8 else (inputs.index_q, inputs.index_weights)
        self.chosen: Tensor = cp_indexer_topk(
            index_q,
            pool.get_index_k_buffer(layer),
            weights,
            self._metadata,
            block_tables=runs.tables,
            page_size=runs.page_size,
            topk=self._config.topk,
            sorted=False,
        )
        if not fp8:
            return attend_paged(self._config, pool, layer, inputs.q, self.chosen, runs)
        out: Tensor = flash_mla_sparse_fwd(
            inputs.q,
            pool.get_key_buffer(layer).flatten(0, 1),
            runs.slots(self.chosen),
            self._config.scale,
            d_v=self._config.kv_lora_rank,
        )[0]
        return out
