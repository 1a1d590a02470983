# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of the decode process: one query of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cpattn.context_parallel.metadata import build_cp_metadata

from .attention import SplitNorm, make_pools
from .model import DsaConfig, SparseInputs
from .pools import RowRuns, choose_positions


class SparseDecodeAttention(SplitNorm):
    """`SparseOperators` of one step: writes the new rows, then runs indexer and attention."""

    def __init__(
        self,
        config: DsaConfig,
        pool: Any,
        block_tables: npt.NDArray[np.int32],
        kv_lens: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
    ) -> None:
        super().__init__(config)
        self._slots = slots
        self._runs = RowRuns(np.ones_like(kv_lens), block_tables, kv_lens, pool.page_size)
        self._metadata = build_cp_metadata(
            self._runs.lens, kv_lens, cp_rank=0, cp_size=1, strategy="contiguous"
        )
        self._pools = make_pools(config, pool)
        self._pools.begin(self._runs)

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """See `SparseOperators`; the chosen positions [rows, topk] stay in ``chosen``."""
        pools, runs = self._pools, self._runs
        pools.write(self._slots, pools.rows(inputs))
        self.chosen = choose_positions(
            self._config,
            pools.index_queries(inputs),
            pools.index_k,
            self._metadata,
            block_tables=runs.tables,
            page_size=runs.page_size,
        )
        return pools.attend(inputs.q, pools.indices(self.chosen))
