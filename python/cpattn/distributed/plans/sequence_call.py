# SPDX-License-Identifier: Apache-2.0
"""Call of `paged_attention` for rows over the keys of one rank.

`cpp/include/cpattn/distributed/sequence_call.h` states the rule that cuts rows into sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ... import _core
from .key_shares import Array, KeyShares
from .tokens import Rows

#: The sides (left, right) of a window, as `cpattn._arguments.key_window` reads them.
Sides: TypeAlias = tuple[int | None, int | None] | None


@dataclass(frozen=True)
class RowMask:
    """Mask of a plan: a row for each new token of a request, a bit for each of its keys."""

    bits: NDArray[np.uint8]
    first_byte: Array  # of each request
    row_bits: Array
    first_position: Array  # of its new tokens


@dataclass(frozen=True)
class Visibility:
    """Rule for the visible keys of a row, by positions."""

    causal: bool
    window: Sides
    mask: RowMask | None


class Positions(NamedTuple):
    """Positions at which biases are looked up."""

    tokens: NDArray[np.int32]  # of the queries
    keys: NDArray[np.int32]  # of a rank, request after request
    begins: Array  # begin of each request in `keys`
    first: Array  # position of the first new token of each request


@dataclass(frozen=True)
class SequenceCall:
    """Arguments of `paged_attention`: each row sees a range of its sequence's keys, or a mask."""

    rows: torch.Tensor  # which rows of the queries, sequence after sequence
    q_lens: Array
    kv_indptr: Array
    kv_indices: Array
    last_page_len: Array
    requests: Array  # of each sequence
    first_key: Array  # among those that the rank has of its request
    page_size: int
    key_ranges: Array | None = None  # begin and end for each row
    packed_custom_mask: NDArray[np.uint8] | None = None


def sequence_call(
    shares: KeyShares, rank: int, pages: _core.LocalPages, rows: Rows, visibility: Visibility
) -> SequenceCall | None:
    """Return the call that computes rows over the keys of a rank, stored in `pages`.

    The call leaves out rows without a key; None if it has no other.
    """
    mask = visibility.mask
    call = shares.share(rank).call(
        pages, rows.request, rows.position, visibility.causal, visibility.window,
        None if mask is None else (mask.bits, mask.first_byte, mask.row_bits, mask.first_position),
    )  # fmt: skip
    return None if call is None else SequenceCall(torch.from_numpy(call[0]), *call[1:])
