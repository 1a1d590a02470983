# SPDX-License-Identifier: Apache-2.0
"""Kinds of passes: with tokens split over ranks, or with all tokens of a decode step on each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....attention import paged_attention
from ....context_parallel import ContextParallelMetadata, build_cp_metadata
from ....distributed import ContextParallel, ContextParallelPlan
from ....scheduling import Batch
from ....sparse import cp_sparse_mla
from .indexed import sparse_call
from .pools import Pools


class OverRanks(ABC):
    """Pass whose layers exchange rows; all ranks learn of an error in one."""

    all_know = False

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attend for a layer, as `Pass` says."""
        try:
            return self._attend(layer, q, k, v, options)
        except BaseException:
            self.all_know = True
            raise

    @abstractmethod
    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor: ...


class SharedOut(OverRanks):
    """Pass in which each rank has its own tokens, of prompts or after them."""

    def __init__(self, cp: ContextParallel, pools: Pools, plan: ContextParallelPlan) -> None:
        self._cp, self._pools, self._plan = cp, pools, plan

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Exchange new rows of a layer, and attend with this rank's rows."""
        caches = self._pools.caches(layer)
        out: Tensor
        if call := sparse_call(q, caches, options):
            self._cp.write_kv(self._plan, k, v, *caches)
            out = self._cp.attend_sparse(self._plan, *call.rows, **call.options)
        else:
            out = self._cp.attend(self._plan, q, *caches, k_local=k, v_local=v, **options)
        return out


class OnEveryRank:
    """Decode step over replicated pools: each rank computes all tokens, and sends nothing.

    Each rank would read all weights even for a share of the tokens.
    """

    all_know = False

    def __init__(self, pools: Pools, batch: Batch) -> None:
        self._pools = pools
        self._slots = torch.from_numpy(batch.slots)
        self._lens: dict[str, Any] = {
            "q_lens": batch.extend_lens,
            "kv_lens": batch.seq_lens,
            "block_tables": batch.block_tables,
        }

    @cached_property
    def _alone(self) -> ContextParallelMetadata:
        """Metadata of the step on a single rank."""
        lens = self._lens["q_lens"], self._lens["kv_lens"]
        return build_cp_metadata(*lens, cp_rank=0, cp_size=1)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Write new rows of a layer, and attend."""
        self._pools.write(layer, self._slots, k, v)
        k_cache, v_cache = self._pools.caches(layer)
        if call := sparse_call(q, (k_cache, v_cache), options):
            return cp_sparse_mla(
                *call.rows, self._alone, block_tables=self._lens["block_tables"],
                page_size=k_cache.shape[1], **call.options,
            )  # fmt: skip
        dim = options.pop("v_head_dim", None)
        values = k_cache[..., :dim] if v_cache is None else v_cache
        return paged_attention(q, k_cache, values, **self._lens, **options)


class OverShards(OverRanks):
    """Decode step over sharded keys: every rank has all queries, and partial results merge."""

    def __init__(self, cp: ContextParallel, pools: Pools, batch: Batch) -> None:
        self._cp, self._pools = cp, pools
        self._plan = cp.plan_decode(batch.seq_lens, block_tables=batch.block_tables)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Write this rank's rows of a layer, alone, and attend to the rows of all ranks."""
        self._cp.write_kv(self._plan, k, v, *self._pools.caches(layer))
        return super().attend(layer, q, k, v, options)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Attend for a layer, whose rows are written."""
        caches = self._pools.caches(layer)
        out: Tensor
        if call := sparse_call(q, caches, options):
            out = self._cp.decode_sparse(self._plan, *call.rows, **call.options)
        else:
            out = self._cp.decode(self._plan, q, *caches, **options)
        return out
