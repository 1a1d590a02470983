# SPDX-License-Identifier: Apache-2.0
"""Rows of several tensors as rows of bytes, in which they travel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .waiting import Posted

ROW_ALIGNMENT = 16  # bytes, so that each part of a row can be viewed as its dtype


class Parts(list[torch.Tensor]):
    """Part of an exchange that a rank brings: its rows, and their place in shared memory."""

    shared_memory = 0  # a digest; 0 for none


@dataclass
class RoutedRows:
    """Rows on their way from ranks, for each part those of all of them."""

    columns: list[torch.Tensor]
    posted: Posted


@dataclass
class ArrivingRows(RoutedRows):
    """Rows of all ranks on their way into a receive buffer."""

    storage: torch.Tensor
    buffer: Hashable


def strides(parts: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each part in a row."""
    num_bytes = [part.shape[1] * part.element_size() for part in parts]
    return [-(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT for n in num_bytes]


def row_bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(strides(parts))


def new_rows(num_rows: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of bytes to be filled; gaps between their parts are 0, as they are sent, too."""
    size, filled = row_bytes(parts), sum(part.shape[1] * part.element_size() for part in parts)
    return (torch.empty if size == filled else torch.zeros)(num_rows, size, dtype=torch.uint8)


def columns_of(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each part's columns of rows of bytes, as its dtype."""
    return [
        column[:, : part.shape[1] * part.element_size()].view(part.dtype)
        for column, part in zip(buffer.split(strides(parts), 1), parts, strict=True)
    ]


def table_of(size: int, num_values: int) -> tuple[np.ndarray[Any, Any], list[torch.Tensor]]:
    """Numbers of every rank, and the bytes of each."""
    table = np.empty((size, num_values), np.int64)
    return table, list(torch.from_numpy(table.view(np.uint8)))
