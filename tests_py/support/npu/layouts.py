# SPDX-License-Identifier: Apache-2.0
"""Sequences as operators of NPUs take them: padded, one after the other, or in blocks."""

from __future__ import annotations

import numpy as np
import torch


def tables_of(lens: tuple[int, ...], block_size: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks in random order, of which one more exists than is used, [sequences, most + 1]."""
    counts = [-(-n // block_size) for n in lens]
    tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
    blocks = rng.permutation(sum(counts) + 1)
    for row, count in zip(tables, counts, strict=True):
        row[:count], blocks = blocks[:count], blocks[count:]
    return tables


def padded(sequences: list[torch.Tensor], spare_rows: int, fill: float = torch.nan) -> torch.Tensor:
    """[B, S, ...] with `fill` after each sequence."""
    rows = max(map(len, sequences)) + spare_rows
    shape = len(sequences), rows, *sequences[0].shape[1:]
    batch = torch.full(shape, fill).to(sequences[0].dtype)
    for entry, sequence in zip(batch, sequences, strict=True):
        entry[: len(sequence)] = sequence
    return batch


def blocks_of(sequences: list[torch.Tensor], tables: np.ndarray, block_size: int) -> torch.Tensor:
    """[blocks, block_size, ...], NaN where no token is."""
    num_blocks = int((tables >= 0).sum()) + 1
    cache = torch.full((num_blocks, block_size, *sequences[0].shape[1:]), torch.nan)
    cache = cache.to(sequences[0].dtype)
    for table, sequence in zip(tables, sequences, strict=True):
        token = np.arange(len(sequence))
        cache[table[token // block_size], token % block_size] = sequence
    return cache


def ends_of(lens: tuple[int, ...], packed: bool) -> list[int]:
    """Lengths as an operator takes them: running sums of packed sequences."""
    return [int(n) for n in (np.cumsum(lens) if packed else lens)]
