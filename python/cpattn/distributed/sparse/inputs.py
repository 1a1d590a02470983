# SPDX-License-Identifier: Apache-2.0
"""Inputs of a layer of sparse attention over sharded pools, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...context_parallel.exchanges import LSE_BYTES
from ...context_parallel.metadata import build_cp_metadata
from ...sparse.cp_attention import cp_sparse_mla
from ..layers.choice import SparseSizes
from ..transport.terms import digest

_PACKED = torch.uint8  # pages of codes, followed by their scales


@dataclass(frozen=True)
class SparseInputs:
    """A rank's rows for indexer and attention, and its shards for both."""

    q: torch.Tensor  # [rows, num_heads, head_dim]
    kv: torch.Tensor  # [slots, 1, dim] or pages of slots
    index_q: torch.Tensor  # [rows, index heads, index dim]
    index_k: torch.Tensor  # form as in cp_indexer_topk
    weights: torch.Tensor  # [rows, index heads]
    index_k_scale: torch.Tensor | None
    page_size: int
    topk: int
    sm_scale: float
    d_v: int
    attn_sink: torch.Tensor | None

    @property
    def latents(self) -> torch.Tensor:
        """The pool as [slots, bytes of a row], uint8."""
        return self.kv.view(-1, self.kv.shape[-1]).view(torch.uint8)

    @property
    def num_slots(self) -> int:
        """Number of slots in both pools."""
        rows = self.index_k.shape[0]
        by_slots = self.index_k.ndim == 3 and self.index_k.shape[1] == 1
        by_slots &= self.index_k.dtype != _PACKED
        return min(len(self.latents), rows if by_slots else rows * self.page_size)

    @property
    def index_key_bytes(self) -> int:
        """Bytes of an index key, with its scale if it has one."""
        dim = self.index_q.shape[2]
        if self.index_k.dtype == _PACKED:
            return dim + 4
        return dim * self.index_k.element_size() + (0 if self.index_k_scale is None else 4)

    def sizes(self) -> SparseSizes:
        """Return the sizes that decide the communicated bytes."""
        q, index_q, weights = self.q, self.index_q, self.weights
        asking = index_q.shape[1] * index_q.shape[2] * index_q.element_size()
        return SparseSizes(
            topk=self.topk,
            query_bytes=q.shape[1] * q.shape[2] * q.element_size(),
            result_bytes=q.shape[1] * (self.d_v * q.element_size() + LSE_BYTES),
            asking_bytes=asking + weights.shape[1] * weights.element_size(),
            latent_bytes=self.latents.shape[1],
            index_key_bytes=self.index_key_bytes,
        )

    def take_index(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return copies of index keys [n, dim], and of their scales [n, 1] if they have any."""
        if self.index_k.dtype == _PACKED:
            pages = self.index_k.flatten(1)
            codes, scales = pages.split(
                [self.page_size * self.index_q.shape[2], self.page_size * 4], dim=1
            )
            where = (rows // self.page_size, rows % self.page_size)
            taken = codes.unflatten(1, (self.page_size, -1))[where]
            return taken.view(torch.float8_e4m3fn), (
                scales.unflatten(1, (self.page_size, 4))[where].view(torch.float32)
            )
        keys = self._rows_of(self.index_k, rows).flatten(1)
        if self.index_k_scale is None:
            return keys, None
        return keys, self._rows_of(self.index_k_scale[..., None], rows).flatten(1)

    def _rows_of(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of a pool of slots or pages; codes as bytes, the only form torch can move."""
        raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        by_slots = pool.ndim == 3 and pool.shape[1] == 1
        where = (rows,) if by_slots else (rows // self.page_size, rows % self.page_size)
        return raw[where].view(pool.dtype)

    def digest(self) -> int:
        """Return a digest of the arguments that must be equal on all ranks."""
        kinds = [(pool.dtype, pool.shape[-1]) for pool in (self.kv, self.index_k)]
        values = (self.topk, self.sm_scale, self.d_v, kinds, self.index_k_scale is None)
        sink = b"" if self.attn_sink is None else np.ascontiguousarray(self.attn_sink.numpy())
        return digest(repr(values).encode(), sink)


def refuse_mask(call: str, mask: object) -> None:
    """Refuse a plan with a mask, which sparse attention does not support."""
    if mask is not None:
        raise ValueError(
            f"ContextParallel.{call}: plan must have no mask, which the indexer does not know"
        )


def checked_sparse_inputs(
    call: str,
    num_rows: int,
    page_size: int,
    q: torch.Tensor,
    kv: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    weights: torch.Tensor,
    *,
    topk: int,
    sm_scale: float,
    d_v: int,
    attn_sink: torch.Tensor | None,
    index_k_scale: torch.Tensor | None,
) -> SparseInputs:
    """Return checked inputs of a layer; the core checks most, by sparse attention of no rows."""
    tensors = {"q": q, "kv": kv, "index_q": index_q, "index_k": index_k, "weights": weights}
    optional = {"attn_sink": attn_sink, "index_k_scale": index_k_scale}
    tensors |= {name: x for name, x in optional.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"ContextParallel.{call}: {name} must be a torch.Tensor, got {type(x).__name__}"
            )
    for name in ("q", "index_q", "weights"):
        if not tensors[name].ndim or len(tensors[name]) < num_rows:
            raise ValueError(
                f"ContextParallel.{call}: {name} must have at least the {num_rows} rows of the "
                f"plan, got shape {list(tensors[name].shape)}"
            )
    if not len(q) == len(index_q) == len(weights):
        raise ValueError(
            f"ContextParallel.{call}: q, index_q and weights must have as many rows, got "
            f"{len(q)}, {len(index_q)} and {len(weights)}"
        )
    if not kv.is_contiguous():
        raise ValueError(
            f"ContextParallel.{call}: kv must be contiguous, got strides {list(kv.stride())}"
        )
    sizes: dict[str, Any] = {"topk": topk, "sm_scale": sm_scale, "d_v": d_v}
    cp_sparse_mla(
        q[:0], kv, index_q[:0], index_k, weights[:0],
        build_cp_metadata([0], [0], cp_rank=0, cp_size=1), block_tables=np.zeros((1, 0), np.int32),
        page_size=page_size, attn_sink=attn_sink, index_k_scale=index_k_scale, **sizes,
    )  # fmt: skip
    own = slice(0, num_rows)
    return SparseInputs(
        q[own], kv, index_q[own], index_k, weights[own].flatten(1), index_k_scale, page_size,
        attn_sink=attn_sink, **sizes,
    )  # fmt: skip
