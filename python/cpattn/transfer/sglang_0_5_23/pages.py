# SPDX-License-Identifier: Apache-2.0
"""Tokens to pages, pages to runs, and the pages that a chunk of a prompt sends.

Functions have the names and the rules of sglang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ... import _core
from ..._arguments import at_least, flag, has
from ..._types import AnyTensor, Indices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def kv_to_page_num(num_tokens: int, page_size: int) -> int:
    """Return the number of pages for `num_tokens` tokens: ``ceil(num_tokens / page_size)``.

    Parameters
    ----------
    num_tokens : int
        At least 0.
    page_size : int
        Tokens per page, at least 1.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        If an argument is no integer or out of its range.

    Examples
    --------
    >>> kv_to_page_num(128, 64), kv_to_page_num(129, 64)
    (2, 3)
    """
    return _core.kv_to_page_num(num_tokens, page_size)


def kv_to_page_indices(kv_indices: Indices, page_size: int) -> NDArray[np.int32]:
    """Find the pages of a request's token slots: ``kv_indices[::page_size] // page_size``.

    The slots must begin a page and fill pages in order, as page allocators assign them; only the
    last page may be partial. The function does not check it: it reads only the first slot of each
    page.

    Parameters
    ----------
    kv_indices : ints [num_tokens]
        Slots of consecutive tokens.
    page_size : int
        Tokens per page, at least 1.

    Returns
    -------
    array [ceil(num_tokens / page_size)], int32

    Raises
    ------
    TypeError, ValueError
        If a slot is no integer or negative, or `page_size` is no integer or below 1.

    Examples
    --------
    >>> kv_to_page_indices([12, 13, 14, 15, 4, 5], page_size=4).tolist()
    [3, 1]
    """
    return _core.kv_to_page_indices(kv_indices, page_size)


def group_concurrent_contiguous(
    src_indices: Indices, dst_indices: Indices
) -> tuple[list[list[int]], list[list[int]]]:
    """Split two index lists wherever either of them is not consecutive.

    Descending or repeated indices always split. The groups are the fewest that can each be copied
    as one block.

    Parameters
    ----------
    src_indices, dst_indices : ints [n]
        Source and destination indices. If either is empty, there are no groups.

    Returns
    -------
    src_groups, dst_groups : lists of lists of int

    Raises
    ------
    TypeError
        If an index is no integer.
    ValueError
        If the lists differ in length and neither is empty.

    Examples
    --------
    >>> group_concurrent_contiguous([2, 3, 7, 8], [20, 21, 40, 42])
    ([[2, 3], [7], [8]], [[20, 21], [40], [42]])
    """
    return _core.group_concurrent_contiguous(src_indices, dst_indices)


@dataclass(frozen=True)
class KVChunk:
    """Chunk of a prompt: tokens of the request, and the pages of the transfer that it sends.

    Parameters
    ----------
    token_start, token_end : int
        Tokens [token_start, token_end) of the request.
    page_start, page_end : int
        Pages of the chunk, counted from the first page of the transfer.
    is_last : bool
        Whether this chunk completes the pages; the aux buffers and states go with it.
    page_size : int
        Tokens per page.
    compat : bool
        Argument of `KVSendCursor`.

    Examples
    --------
    Tokens 4 to 9 of ten, in pages of four, are on the second and third page:

    >>> cursor = KVSendCursor(num_tokens=10, page_size=4)
    >>> _, chunk = cursor.advance(6), cursor.advance(10, last_chunk=True)
    >>> (chunk.token_start, chunk.token_end), (chunk.page_start, chunk.page_end), chunk.is_last
    ((4, 10), (1, 3), True)
    >>> slots = [20, 21, 22, 23, 8, 9, 10, 11, 12, 13]
    >>> src_pages, dst_pages = chunk.select(slots, [7, 5, 6])
    >>> src_pages.tolist(), dst_pages
    ([2, 3], [5, 6])
    """

    token_start: int
    token_end: int
    page_start: int
    page_end: int
    is_last: bool
    page_size: int
    compat: bool = False

    def select(self, kv_indices: Indices, dst_page_indices: Indices) -> tuple[Indices, Indices]:
        """Select the chunk's pages on both sides.

        Parameters
        ----------
        kv_indices : ints [num_tokens]
            Slots of the request's tokens, from token 0.
        dst_page_indices : ints [num_pages]
            The destination's pages for the whole transfer.

        Returns
        -------
        src_pages : array [n], int32
        dst_pages : of the type of `dst_page_indices`, [n]
            With compat and too few pages of the destination, both are as long as the destination's.

        Raises
        ------
        TypeError
            If an index is no integer.
        ValueError
            If either side has fewer pages than the chunk; with compat, if the source has fewer
            than the destination.
        """
        slots = as_listed(kv_indices, "KVChunk.select", "kv_indices")
        pages = as_listed(dst_page_indices, "KVChunk.select", "dst_page_indices")
        src = kv_to_page_indices(slots[self.token_start : self.token_end], self.page_size)
        dst = pages[self.page_start : self.page_end]
        num_pages = self.page_end - self.page_start
        fits = len(dst) <= len(src) if self.compat else len(src) == len(dst) == num_pages
        if not fits:
            raise ValueError(
                f"KVChunk.select: pages [{self.page_start}, {self.page_end}) must exist on both "
                f"sides, got {len(src)} of the source and {len(dst)} of the destination"
            )
        return src[: len(dst)], dst


def as_listed(indices: Indices, function: str, argument: str) -> AnyTensor:
    """Return indices that can be sliced: an array itself, or the current elements of a list."""
    if isinstance(indices, (list, tuple)) or not has(indices, "__getitem__"):
        return _core.ints(indices, function, argument)
    _core.index_count(indices, function, argument)
    return indices


@dataclass
class KVSendCursor:
    """Position in the sending of a prompt, chunk by chunk.

    Full pages are sent as soon as they are computed, the partial page with the last chunk. The last
    chunk is the one that completes the pages, whatever the caller passes.

    Parameters
    ----------
    num_tokens : int
        Length of the prompt.
    page_size : int
        Tokens per page.
    decode_prefix_len : int, optional
        Leading tokens that the destination has already. They must end at a page border, else
        ValueError (compat: later pages are misplaced).
    compat : bool, optional
        Whether to follow engines: a destination with too few pages gets as many as it has.

    Attributes
    ----------
    start_send_idx : int
        Next token to send.
    curr_idx : int
        Next page of the transfer.
    num_pages : int
        Number of pages of the transfer.

    Raises
    ------
    TypeError
        If a number is no integer, or `compat` no bool.
    ValueError
        If a number is out of range, or the prefix is longer than the prompt or ends within a page.

    Examples
    --------
    >>> cursor = KVSendCursor(num_tokens=10, page_size=4)
    >>> for num_computed in (3, 6, 10):
    ...     chunk = cursor.advance(num_computed, last_chunk=num_computed == 10)
    ...     print(chunk and (chunk.token_start, chunk.token_end, chunk.is_last))
    None
    (0, 4, False)
    (4, 10, True)
    """

    num_tokens: int
    page_size: int
    decode_prefix_len: int = 0
    compat: bool = False
    start_send_idx: int = field(init=False)
    curr_idx: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for name, minimum in (("num_tokens", 0), ("page_size", 1), ("decode_prefix_len", 0)):
            setattr(self, name, at_least(minimum, getattr(self, name), "KVSendCursor", name))
        self.compat = flag(self.compat, "KVSendCursor", "compat")
        if self.decode_prefix_len > self.num_tokens:
            raise ValueError(
                f"KVSendCursor: decode_prefix_len must be within the {self.num_tokens} tokens, "
                f"got {self.decode_prefix_len}"
            )
        self.num_pages = kv_to_page_num(self.num_tokens - self.decode_prefix_len, self.page_size)
        if self.decode_prefix_len % self.page_size and not self.compat:
            raise ValueError(
                f"KVSendCursor: decode_prefix_len must be a multiple of page_size "
                f"{self.page_size}, got {self.decode_prefix_len}"
            )
        self.start_send_idx = self.decode_prefix_len

    def advance(
        self, num_computed: int, *, last_chunk: bool = False, end: int | None = None
    ) -> KVChunk | None:
        """Return the chunk to send once `num_computed` tokens are computed, and advance past it.

        Parameters
        ----------
        num_computed : int
            Computed tokens of the prompt.
        last_chunk : bool
            Whether this is the last call. A last chunk includes the partial page and is returned
            even without pages, because metadata goes with it.
        end : int, optional
            End of the chunk, instead of ``min(num_computed, num_tokens)``.

        Returns
        -------
        KVChunk or None
            None if there is nothing to send.

        Raises
        ------
        TypeError
            If a number is no integer, or `last_chunk` no bool.
        ValueError
            If a number is negative, or `end` is beyond the prompt.
        """
        function = "KVSendCursor.advance"
        last_chunk = flag(last_chunk, function, "last_chunk")
        if end is None:
            end = min(at_least(0, num_computed, function, "num_computed"), self.num_tokens)
        else:
            end = at_least(0, end, function, "end")
            if end > self.num_tokens:
                raise ValueError(
                    f"{function}: end must be within the {self.num_tokens} tokens, got {end}"
                )
        if not last_chunk:
            end -= end % self.page_size
        if end < self.start_send_idx or (end == self.start_send_idx and not last_chunk):
            return None
        start, page = self.start_send_idx, self.curr_idx
        self.start_send_idx = end
        self.curr_idx += kv_to_page_num(end - start, self.page_size)
        is_last = self.curr_idx == self.num_pages
        return KVChunk(start, end, page, self.curr_idx, is_last, self.page_size, self.compat)


KVChunk.__module__ = KVSendCursor.__module__ = "cpattn.transfer.sglang_0_5_23"
