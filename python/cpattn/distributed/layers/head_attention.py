# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank's rows with some heads, over the whole context in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...context_parallel.attention import do_cp_attn_fia
from .layer import RankLayer
from .rows import flat_rows


class HeadOutputs:
    """Outputs of a rank's rows, written in place for some heads at a time.

    The LSE is optional: its exact sums take a fifth longer on AMX.
    """

    def __init__(self, layer: RankLayer[Any]) -> None:
        plan, inputs = layer.plan, layer.inputs
        q, num_rows = inputs.q, plan.num_physical_rows
        self._plan, self._inputs = plan, inputs
        self._q = q
        if len(q) != num_rows:
            self._q = q.new_zeros(num_rows, *q.shape[1:])
            self._q[: len(q)] = q
        self._out = q.new_empty(num_rows, q.shape[1], inputs.v.shape[2])
        lse = q.new_empty(num_rows, q.shape[1], dtype=torch.float32)
        self._lse = lse if layer.return_lse else None

    def attend(
        self, heads: slice, block_tables: NDArray[np.int32], caches: Sequence[torch.Tensor]
    ) -> None:
        """Attend with the query heads that read some of the KV heads.

        `caches` are keys [num_slots, len(heads), dim], and values unless they are part of the keys.
        """
        plan, inputs = self._plan, self._inputs
        q_heads = inputs.q_heads(heads)
        options = inputs.options.of_heads(heads, q_heads)
        result = do_cp_attn_fia(
            _columns(self._q, q_heads), caches[0], None if inputs.shares_values else caches[1],
            plan.metadata, block_tables=block_tables, page_size=plan.page_size,
            num_heads=q_heads.stop - q_heads.start, num_kv_heads=heads.stop - heads.start,
            packed_custom_mask=plan.packed_custom_mask,
            v_head_dim=inputs.v.shape[-1] if inputs.shares_values else None,
            out=_columns(self._out, q_heads), return_lse=self._lse is not None,
            **options.keywords(),
        )  # fmt: skip
        if self._lse is not None:
            self._lse[:, q_heads] = result[1]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs and the LSE of the rank's rows, in all heads."""
        num_rows = len(self._inputs.q)
        return self._out[:num_rows], None if self._lse is None else self._lse[:num_rows]


def _columns(x: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return some heads of [rows, heads, dim], as columns of the rows."""
    return flat_rows(x)[:, heads.start * x.shape[2] : heads.stop * x.shape[2]]
