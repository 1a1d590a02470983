# SPDX-License-Identifier: Apache-2.0
"""Paged attention without a paged kernel: gathers the pages, then torch SDPA with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from cpattn.distributed import ContextParallelPlan


@dataclass(frozen=True)
class Segment:
    """Rows of one request at evenly spaced positions: one SDPA call."""

    rows: slice
    slots: Tensor  # int64 [kv_len of the last row]: what to gather
    lens: Tensor  # int64 [rows]: number of visible keys of each row
    mask: Tensor | None  # bool [rows, kv_len]; None if SDPA's own causal mask is the same


def make_segments(
    request_indices: npt.NDArray[Any],
    kv_lens: npt.NDArray[Any],
    block_tables: npt.NDArray[np.int32],
    page_size: int,
    *,
    stride: int = 1,
    masks: bool = True,
) -> list[Segment]:
    """Cut local rows into segments; masks depend on lengths only, so all layers share them.

    request_indices, kv_lens : int, shape [rows]
        Sequence of each row, and number of its visible keys: its position + 1.
    block_tables : int32, shape [sequences, pages]
    stride
        Distance of neighbouring rows of a sequence: the number of ranks under interleave, else 1.
    masks
        Whether segments have masks.
    """
    broken = (np.diff(request_indices) != 0) | (np.diff(kv_lens) != stride)
    cuts = [0, *(np.flatnonzero(broken) + 1).tolist(), len(kv_lens)]
    segments = []
    for begin, end in pairwise(cuts) if len(kv_lens) else ():
        lens = torch.from_numpy(np.asarray(kv_lens[begin:end], dtype=np.int64))
        position = np.arange(int(lens[-1]))
        pages = block_tables[request_indices[begin], position // page_size].astype(np.int64)
        whole = stride == 1 and end - begin == len(position)
        segments.append(
            Segment(
                rows=slice(begin, end),
                slots=torch.from_numpy(pages * page_size + position % page_size),
                lens=lens,
                mask=None if whole or not masks else torch.arange(len(position)) < lens[:, None],
            )
        )
    return segments


def segments_of(
    plan: ContextParallelPlan, tables: npt.NDArray[np.int32], *, masks: bool = True
) -> list[Segment]:
    """Return segments of the rows of a plan; `tables` has the pages of their keys."""
    metadata: Any = plan.metadata
    return make_segments(
        metadata.query_request_indices,
        metadata.query_cache_lengths,
        tables,
        plan.page_size,
        stride=metadata.cp_size if metadata.strategy == "interleave" else 1,
        masks=masks,
    )


def gathered_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, segments: list[Segment], *, scale: float
) -> Tensor:
    """Return attention [rows, Hq, D] of q [rows, Hq, D] over caches [slots, Hk, D]."""
    out = torch.empty_like(q)
    for segment in segments:
        k, v = k_cache[segment.slots], v_cache[segment.slots]
        out[segment.rows] = sdpa(q[segment.rows], k, v, segment.mask, scale=scale)
    return out


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """Return attention [rows, Hq, D] of q to k, v [keys, Hk, D]; causal without `mask`."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
