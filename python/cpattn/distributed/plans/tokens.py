# SPDX-License-Identifier: Apache-2.0
"""New tokens of a batch: their slots and rows, each list made on demand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ... import _core
from ...context_parallel.metadata import ContextParallelMetadata

Array = NDArray[np.int64]


class Rows(NamedTuple):
    """Rows of some queries: request and position within the request."""

    request: Array
    position: Array


@dataclass(frozen=True, eq=False)
class NewTokens:
    """New tokens of a batch: the last tokens of each request in turn, then all padding.

    Rows are tokens in the order of the ranks that compute them, or in batch order without metadata.
    """

    pages: _core.BatchPages
    q_lens: Array  # without padding
    padding: int = 0
    given_slots: Array | None = None
    metadata: ContextParallelMetadata | None = None

    @cached_property
    def slots(self) -> Array:
        """Pool row of each token, -1 if none is written; read-only."""
        if self.given_slots is None:
            return self.pages.slots(self.q_lens, self.padding)
        self.given_slots.flags.writeable = False
        return self.given_slots

    @cached_property
    def first_positions(self) -> Array:
        """Position of the first new token of each request."""
        return self.pages.kv_lens - self.q_lens

    @cached_property
    def padded_lens(self) -> tuple[Array, Array]:
        """New tokens and keys of each request; padding counts as tokens of the last request."""
        q_lens = self.q_lens.copy()
        q_lens[-1:] += self.padding
        return q_lens, self.first_positions + q_lens

    @property
    def padded_counts(self) -> tuple[Array, int]:
        """New tokens of each request, and number of padding tokens."""
        return self.q_lens, self.padding

    @cached_property
    def gathered_rows(self) -> torch.Tensor:
        """Row of each token."""
        if self.metadata is None:
            return torch.arange(len(self.slots), device="cpu")
        return torch.from_numpy(self.metadata._gathered_row_indices().astype(np.int64))

    @cached_property
    def rows(self) -> Rows:
        """Requests and positions of all rows."""
        of_tokens = None if self.metadata is None else self.metadata._gathered_row_indices()
        return Rows(*self.pages.rows(self.q_lens, self.padding, of_tokens))

    @cached_property
    def are_cached_by_others(self) -> bool:
        """Whether cached tokens of a request are new tokens of another request."""
        return self.pages.caches_new_tokens(self.q_lens)

    def rows_in(self, part: slice) -> Rows:
        """Requests and positions of some rows; this rank's rows need no list of all rows."""
        plan = self.metadata
        if "rows" not in vars(self) and plan is not None:
            begin = sum(plan.per_rank_actual_token[: plan.cp_rank])
            if part == slice(begin, begin + plan.per_rank_actual_token[plan.cp_rank]):
                request, lengths = plan.query_request_indices, plan.query_cache_lengths
                return Rows(np.asarray(request, np.int64), np.asarray(lengths, np.int64) - 1)
        return Rows(self.rows.request[part], self.rows.position[part])

    @cached_property
    def row_slots(self) -> Array:
        """Slots of all rows."""
        if self.metadata is None:
            return self.slots
        slots = np.empty_like(self.slots)
        slots[self.gathered_rows.numpy()] = self.slots
        return slots


def index_array(name: str, values: Any, ndim: int, call: str) -> NDArray[Any]:
    """Return an index argument as an array of int32 or int64: a view, or a copy."""
    try:
        array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except Exception as error:
        raise TypeError(
            f"{call}: {name} must be integers in {ndim} dimensions, got {type(values).__name__}"
        ) from error
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{call}: {name} must not be masked")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{call}: {name} must be integers, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(
            f"{call}: {name} must have {ndim} dimensions, got shape {list(array.shape)}"
        )
    forward = all(step >= 0 for step in array.strides)
    is_read = array.dtype in (np.int32, np.int64) and array.flags.aligned and forward
    return array if is_read else array.astype(np.int64)
