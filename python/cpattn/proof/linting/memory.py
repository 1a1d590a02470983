# SPDX-License-Identifier: Apache-2.0
"""What an address of a KV memory means: layer, kind, token of the sequence, byte of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .intervals import Ints, ints, tally

_MIDDLE = 2**63  # of the addresses: 64 bits without a sign are kept as their distance from it


def addresses(values: Sequence[int]) -> Ints:
    """Addresses below 2^64 as integers with a sign, in the same order and distances."""
    return (np.asarray(values, np.uint64).reshape(-1) ^ np.uint64(_MIDDLE)).view(np.int64)


def address(value: Any) -> int:
    """The address that one of `addresses` stands for."""
    return int(value) + _MIDDLE


def as_hex(value: Any) -> str:
    """Return the address as text, as debuggers show it."""
    return f"{address(value):#x}"


@dataclass(frozen=True)
class Memory:
    """One process's buffers, in the order of their addresses."""

    name: str
    document: Mapping[str, Any]

    @property
    def page_size(self) -> int:
        return int(self.document["page_size"])

    @cached_property
    def entries(self) -> list[Mapping[str, Any]]:
        used = [entry for entry in self.document["entries"] if entry["nbytes"]]
        return sorted(used, key=lambda entry: int(entry["addr"]))

    def column(self, name: str) -> Ints:
        return ints([entry[name] for entry in self.entries])

    @cached_property
    def addr(self) -> Ints:
        return addresses([entry["addr"] for entry in self.entries])

    @cached_property
    def end(self) -> Ints:
        return self.addr + self.column("nbytes")

    @cached_property
    def item_len(self) -> Ints:
        return np.maximum(self.column("item_len"), 1)

    @cached_property
    def row_bytes(self) -> Ints:
        """Bytes of a token in a page of each entry."""
        return np.maximum(self.item_len // self.page_size, 1)

    @cached_property
    def skipped(self) -> Ints:
        """Bytes of the heads before those that an entry has."""
        heads = [entry.get("heads", (0, 1)) for entry in self.entries]
        first = ints([h[0] for h in heads])
        return first * (self.row_bytes // np.maximum(ints([h[1] for h in heads]), 1))

    @cached_property
    def keys(self) -> list[tuple[int, str, bool]]:
        """What each entry holds."""
        return [(e["layer"], e["kind"], e.get("draft", False)) for e in self.entries]

    def label(self, entry: int) -> str:
        """As "k of layer 3"."""
        layer, kind, draft = self.keys[entry]
        return f"{kind} of {'draft ' if draft else ''}layer {layer}"

    def find(self, begin: Ints, length: Ints) -> Ints:
        """The entry that has all of each range, or -1."""
        if not len(self.addr):
            return np.full(len(begin), -1, np.int64)
        entry = np.searchsorted(self.addr, begin, side="right") - 1
        known = np.maximum(entry, 0)
        inside = (entry >= 0) & (begin + length <= self.end[known])
        return np.where(inside, entry, -1)

    def outside_registered(self, begin: Ints, length: Ints) -> np.ndarray:
        """Ranges that are not within registered memory; none if nobody says what that is."""
        regions: Sequence[Sequence[int]] = self.document.get("registered", ())
        if "registered" not in self.document:
            return np.zeros(len(begin), bool)
        low = addresses([region[0] for region in regions])
        edges, counts = tally(low, low + ints([region[1] for region in regions]))
        inside = counts > 0
        starts = edges[inside & ~np.concatenate([[False], inside[:-1]])] if len(edges) else edges
        stops = edges[~inside & np.concatenate([[False], inside[:-1]])] if len(edges) else edges
        at = np.searchsorted(starts, begin, side="right") - 1
        if not len(starts):
            return np.ones(len(begin), bool)
        return (at < 0) | (begin + length > stops[np.maximum(at, 0)])

    def meaning(self, entry: Ints, begin: Ints, pages: Ints) -> tuple[Ints, Ints]:
        """Of addresses in entries: the token, by the list of pages of its sequence, and the byte.

        The token is -1 on a page that is not in the list.
        """
        page, within = np.divmod(begin - self.addr[entry], self.item_len[entry])
        row, byte = np.divmod(within, self.row_bytes[entry])
        order = np.argsort(pages, kind="stable")
        place = np.searchsorted(pages[order], page)
        known = np.minimum(place, max(len(pages) - 1, 0))
        listed = (pages[order][known] == page) if len(pages) else np.zeros(len(page), bool)
        token = order[known] * self.page_size + row if len(pages) else np.zeros_like(page)
        return np.where(listed, token, -1), byte + self.skipped[entry]
