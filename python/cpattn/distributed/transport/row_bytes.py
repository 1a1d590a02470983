# SPDX-License-Identifier: Apache-2.0
"""Rows of several tensors packed into rows of bytes for transport."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .waiting import Posted

ROW_ALIGNMENT = 16  # bytes; allows a view of each part as its dtype


class Parts(list[torch.Tensor]):
    """A rank's part of an exchange: its rows, and their place in shared memory."""

    shared_memory = 0  # a digest; 0 for none


@dataclass
class RoutedRows:
    """Rows on their way from ranks; each part has the rows of all of them."""

    columns: list[torch.Tensor]
    posted: Posted


@dataclass
class ArrivingRows(RoutedRows):
    """Rows of all ranks on their way into a receive buffer."""

    storage: torch.Tensor
    buffer: Hashable


def strides(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes of each part in a row."""
    num_bytes = [part.shape[1] * part.element_size() for part in parts]
    return [-(-n // ROW_ALIGNMENT) * ROW_ALIGNMENT for n in num_bytes]


def row_bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(strides(parts))


def new_rows(num_rows: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make rows of bytes to fill; gaps between parts are 0, as gaps are sent, too."""
    size, filled = row_bytes(parts), sum(part.shape[1] * part.element_size() for part in parts)
    make = torch.empty if size == filled else torch.zeros
    return make(num_rows, size, dtype=torch.uint8, device="cpu")


def columns_of(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each part's columns in rows of bytes, as its dtype."""
    return [
        column[:, : part.shape[1] * part.element_size()].view(part.dtype)
        for column, part in zip(buffer.split(strides(parts), 1), parts, strict=True)
    ]


def table_of(size: int, num_values: int) -> tuple[np.ndarray[Any, Any], list[torch.Tensor]]:
    """Return numbers of every rank, and their bytes."""
    table = np.empty((size, num_values), np.int64)
    return table, list(torch.from_numpy(table.view(np.uint8)))
