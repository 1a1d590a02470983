# SPDX-License-Identifier: Apache-2.0
"""Pages for keys and values of sequences that lie one after another in a torch tensor."""

from __future__ import annotations

import numpy as np

from .._types import AnyTensor
from ._visibility import Lengths


def dense_rows(x: AnyTensor) -> AnyTensor:
    """Return `x` with a contiguous last dimension; copies only if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


class RaggedPages:
    """Pages of ragged sequences; a page starts at every row and covers the rows after it.

    A sequence thus has pages wherever it starts, without copies. The page length is the number of
    rows after the last start: the longest for which the last page of every sequence ends within the
    tensor. In most batches each sequence has one or a few pages.

    Parameters
    ----------
    starts : int64 array, shape [batch]
        First row of each sequence.
    kv_lens : int64 array, shape [batch]
        Number of key rows of each sequence.
    num_rows : int
        Rows of the tensor.

    Attributes
    ----------
    page_size, num_pages : int
    block_tables : int64 array, shape [batch, pages]
    """

    def __init__(self, starts: Lengths, kv_lens: Lengths, num_rows: int) -> None:
        used = starts[kv_lens > 0]
        self.page_size = int(num_rows - used.max()) if len(used) else 1
        self.num_pages = max(num_rows - self.page_size + 1, 0)
        most = -(-int(kv_lens.max(initial=0)) // self.page_size)
        self.block_tables = starts[:, None] + self.page_size * np.arange(most)

    def of(self, rows: AnyTensor) -> AnyTensor:
        """Return rows [num_rows, heads, dim] as a view [num_pages, page_size, heads, dim]."""
        if self.page_size == 1:  # also without rows, which unfold() refuses
            return rows.unsqueeze(1)
        return rows.unfold(0, self.page_size, 1).movedim(-1, 1)
