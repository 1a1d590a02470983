# SPDX-License-Identifier: Apache-2.0
"""Names of placements of keys in the pools of ranks, and the sizes that follow from them."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..kv import PageInterleave, Placement, TokenInterleave
from .exchanges import PLACEMENTS

REPLICATED, BY_PAGES, BY_TOKENS = PLACEMENTS
MAX_INTERLEAVE = 1 << 16


class PlacementName(NamedTuple):
    """Name of a placement, and the run length of token interleave."""

    kind: str
    interleave: int = 1  # of token_interleave: consecutive tokens of a rank

    @classmethod
    def parse(cls, text: str) -> PlacementName | None:
        """Parse a name such as ``token_interleave:16``; None if it names no placement."""
        if text in PLACEMENTS:
            return cls(text)
        match = re.fullmatch(rf"{BY_TOKENS}:([0-9]{{1,9}})", text)
        if match and 1 <= int(match[1]) <= MAX_INTERLEAVE:
            return cls(BY_TOKENS, int(match[1]))
        return None

    def over(self, shard_size: int, page_size: int) -> Placement | None:
        """Return the placement over so many ranks, or None if each rank holds all keys."""
        if self.kind == REPLICATED:
            return None
        if self.kind == BY_PAGES:
            return PageInterleave(shard_size=shard_size, page_size=page_size)
        return TokenInterleave(shard_size=shard_size, interleave=self.interleave)

    def whole_pages(self, num_pages: int, shard_size: int) -> int:
        """Return how many of `num_pages` can be given out: every rank has an equal number."""
        return num_pages - num_pages % shard_size if self.kind == BY_PAGES else num_pages

    def rank_pages(self, num_pages: int, shard_size: int, page_size: int) -> int:
        """Return the pages that the pool of a rank needs for `whole_pages`, without its page 0."""
        if self.kind == REPLICATED:
            return num_pages
        if self.kind == BY_PAGES:
            return num_pages // shard_size
        turn = self.interleave * shard_size
        slots = -(-(num_pages + 1) * page_size // turn) * self.interleave  # page 0 included
        return max(-(-slots // page_size) - 1, 1)
