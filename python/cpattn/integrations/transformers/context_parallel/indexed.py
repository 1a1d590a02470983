# SPDX-License-Identifier: Apache-2.0
"""Layers of DeepSeek-V3.2 and its like over ranks, which attend to keys that an indexer selects.

During a pass the indexer selects nothing itself: it returns a `Selection`, whose keys are stored
beside the latents, and ranks select from the keys of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._methods import Replaced
from ..dsa import index_rows, rotation_of

KIND = "indexed_attention"  # in `layer_types` of a configuration


@dataclass(frozen=True)
class Selection:
    """Queries, keys and weights of some rows, by which an indexer selects keys.

    `q` is [rows, index heads, dim], `k` [rows, 1, dim] and `weights` [rows, index heads].
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    topk: int


class SparseCall(NamedTuple):
    """Arguments of the sparse functions of `ContextParallel`, and of `cp_sparse_mla`."""

    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]


def sparse_call(
    q: Tensor, caches: tuple[Tensor, Tensor | None], options: dict[str, Any]
) -> SparseCall | None:
    """Return the arguments of a layer with a `Selection` in its options, or None."""
    selection = options.get("selection")
    if selection is None:
        return None
    latents, index_keys = caches
    assert index_keys is not None
    return SparseCall(
        (q, latents, selection.q, index_keys.flatten(0, 1), selection.weights),
        {"topk": selection.topk, "sm_scale": options["scale"], "d_v": options["v_head_dim"]},
    )


class Indexers:
    """Indexers of a model, or none."""

    def __init__(self, model: Any) -> None:
        self._modules = [module for module in model.modules() if rotation_of(module)]
        #: Inputs of such a model: its layers read a mask, which has no elements here.
        self.inputs: dict[str, Tensor] = {}
        if self._modules:
            self.inputs["attention_mask"] = torch.empty(1, 1, 0, 0)

    def selecting_later(self) -> Replaced:
        """Let indexers return a `Selection`, until the end of ``with``."""

        def forward(
            module: Any,
            hidden_states: Tensor,
            q_resid: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            *mask_and_cache: Any,
            **others: Any,
        ) -> Selection:
            rotate = rotation_of(module)
            assert rotate
            q, k, weights = index_rows(module, rotate, hidden_states, q_resid, position_embeddings)
            if q.dtype == torch.float16:
                raise ValueError("its indexer must compute in float32 or bfloat16, got float16")
            return Selection(q[0], k[0].unsqueeze(1), weights[0], module.index_topk)

        return Replaced(self._modules, "forward", forward)
