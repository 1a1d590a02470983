# SPDX-License-Identifier: Apache-2.0
"""Meaning of addresses in a KV memory: layer, kind, token of the sequence, byte of its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .intervals import Ints, Undecided, each, first_of, ints, tally

MOST_PAGES = 10_000_000  # copied by descriptors; more would take gigabytes
_MIDDLE = 2**63  # of the address range: addresses are stored as signed distance from it


def addresses(values: Sequence[int]) -> Ints:
    """Convert addresses below 2^64 to signed integers with the same order and distances."""
    return (np.asarray(values, np.uint64).reshape(-1) ^ np.uint64(_MIDDLE)).view(np.int64)


def address(value: Any) -> int:
    """Return the original address of a converted one."""
    return int(value) + _MIDDLE


def as_hex(value: Any) -> str:
    """Return the address as text, in the form of debuggers."""
    return f"{address(value):#x}"


class Groups(NamedTuple):
    """Buffers with interleaved pages that repeat with a stride; most groups have one buffer.

    ``entry`` has all entries by ``place``: a group's first address, then theirs modulo its stride.
    """

    begin: Ints
    end: Ints
    stride: Ints
    first: Ints  # place of each group in the lists of entries
    size: Ints  # entries of each group
    entry: Ints
    place: Ints

    def before(self, at: Ints) -> tuple[Ints, Ints]:
        """Return the last group and last entry that begin before the addresses, or the first."""
        group = np.maximum(np.searchsorted(self.begin, at, side="right") - 1, 0)
        begin = self.begin[group]
        folded = begin + (at - begin) % self.stride[group]
        return group, np.searchsorted(self.place, folded, side="right") - 1

    def meetings(self, item_len: Ints) -> list[tuple[int, int]]:
        """Return, in order, entries that overlap modulo the stride of their group."""
        last = self.first + self.size - 1
        follower, border = np.roll(self.entry, -1), np.roll(self.place, -1)
        follower[last], border[last] = self.entry[self.first], self.begin + self.stride
        meets = self.place + item_len[self.entry] > border
        meets[last] &= self.size > 1
        pairs = np.sort(np.stack([self.entry, follower], axis=1)[meets], axis=1)
        return [(int(one), int(two)) for one, two in pairs]


@dataclass(frozen=True)
class Memory:
    """Buffers of one process, in address order."""

    name: str
    document: Mapping[str, Any]

    @property
    def page_size(self) -> int:
        return int(self.document["page_size"])

    @cached_property
    def entries(self) -> list[Mapping[str, Any]]:
        used = [entry for entry in self.document["entries"] if entry["nbytes"]]
        return sorted(used, key=lambda entry: int(entry["addr"]))

    def column(self, name: str, default: int = 0) -> Ints:
        return ints([entry.get(name, default) for entry in self.entries])

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
    def stride(self) -> Ints:
        """Bytes from page to page of each entry."""
        return np.where(self.column("page_stride"), self.column("page_stride"), self.item_len)

    @cached_property
    def num_pages(self) -> Ints:
        return (self.end - self.addr - self.item_len) // self.stride + 1

    @cached_property
    def row_bytes(self) -> Ints:
        """Bytes of a token in a page of each entry."""
        return np.maximum(self.item_len // self.page_size, 1)

    @cached_property
    def heads(self) -> tuple[Ints, Ints]:
        """First head of each entry, and its number of heads."""
        heads = [entry.get("heads", (0, 1)) for entry in self.entries]
        return ints([h[0] for h in heads]), np.maximum(ints([h[1] for h in heads]), 1)

    @cached_property
    def head_bytes(self) -> Ints:
        """Bytes of a head of a token of each entry."""
        return np.maximum(self.row_bytes // self.heads[1], 1)

    @cached_property
    def heads_first(self) -> NDArray[np.bool_]:
        """Whether all tokens of a head are adjacent in a page of an entry."""
        order = np.array([entry.get("kv_layout") == "HND" for entry in self.entries], bool)
        return order & (self.heads[1] > 1)

    @cached_property
    def step(self) -> Ints:
        """Bytes from token to token in a page of each entry."""
        return np.where(self.heads_first, self.head_bytes, self.row_bytes)

    @cached_property
    def unit(self) -> Ints:
        """Bytes of a page of each entry within which tokens follow by `step`."""
        return np.where(self.heads_first, self.head_bytes * self.page_size, self.item_len)

    @cached_property
    def skipped(self) -> Ints:
        """Bytes of the heads before the first head of an entry."""
        return self.heads[0] * self.head_bytes

    @cached_property
    def groups(self) -> Groups:
        """Entries by group; `Undecided` if a stride does not tell them apart."""
        begins = self.addr[1:] >= np.maximum.accumulate(self.end)[:-1]
        first = np.flatnonzero(np.concatenate([[True], begins]))
        count = np.diff(first, append=len(self.addr))
        begin, end = self.addr[first], np.maximum.reduceat(self.end, first)
        stride = np.gcd.reduceat(np.where(self.num_pages > 1, self.stride, 0), first)
        stride = np.where(stride, stride, end - begin)
        low = np.repeat(begin, count)
        place = low + (self.addr - low) % np.repeat(stride, count)
        entry = np.lexsort((self.addr, place))
        groups = Groups(begin, end, stride, first, count, entry, place[entry])
        for one, two in groups.meetings(self.item_len):
            if self.stride[one] != self.stride[two] or self.end[one] <= self.addr[two]:
                raise Undecided(
                    f"{self.label(one)} and {self.label(two)} of {self.name} are between pages of "
                    "buffers with other strides"
                )
        return groups

    def overlap(self) -> tuple[int, int] | None:
        """Two entries that share memory, or None."""
        within = (self.stride == self.item_len)[:-1] & (self.end[:-1] > self.addr[1:])
        if (bad := first_of(within)) is not None:
            return bad, bad + 1
        meetings = self.groups.meetings(self.item_len) if len(self.addr) else []
        return meetings[0] if meetings else None

    @cached_property
    def keys(self) -> list[tuple[int, str, bool]]:
        """Layer and kind of each entry, and whether it is a draft layer."""
        return [(e["layer"], e["kind"], e.get("draft", False)) for e in self.entries]

    def label(self, entry: int) -> str:
        """Return the name of an entry, as "k of layer 3"."""
        layer, kind, draft = self.keys[entry]
        return f"{kind} of {'draft ' if draft else ''}layer {layer}"

    def find(self, begin: Ints, length: Ints) -> Ints:
        """Find the entry that contains each range, in one page or joined pages; else -1."""
        if not len(self.addr):
            return np.full(len(begin), -1, np.int64)
        entry = self.groups.entry[self.groups.before(begin)[1]]
        offset, stride, item = begin - self.addr[entry], self.stride[entry], self.item_len[entry]
        inside = (offset >= 0) & (offset + length <= (self.end - self.addr)[entry])
        inside &= (stride == item) | (offset % stride + length <= item)
        return np.where(inside, entry, -1)

    def has(self, begin: Ints, length: Ints) -> NDArray[np.bool_]:
        """Tell whether each range is in one entry, or in entries with interleaved pages."""
        inside = self.find(begin, length) >= 0
        if inside.all() or not len(self.addr):
            return inside
        groups, (group, _) = self.groups, self.groups.before(begin)
        within = (begin >= groups.begin[group]) & (begin + length <= groups.end[group])
        rest = np.flatnonzero(~inside & within & (groups.size[group] > 1))
        owner, moved, size = self.cut(begin[rest], length[rest])
        lost = self.find(begin[rest][owner] + moved, size) < 0
        inside[rest] = np.bincount(owner[lost], minlength=len(rest)) == 0
        return inside

    def cut(self, begin: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut ranges at pages and, if heads come first, at heads; return owner, offset and bytes.

        All ranges must satisfy `has`.
        """
        if not len(self.addr):
            return ints([]), ints([]), ints([])
        groups, (group, which) = self.groups, self.groups.before(begin)
        low, stride, count = groups.begin[group], groups.stride[group], groups.size[group]
        first = (begin - low) // stride * count + which
        end = begin + length - 1
        last = (end - low) // stride * count + groups.before(end)[1]
        owner, step = _each_page(np.where(length > 0, last - first + 1, 0))
        turn, which = np.divmod((first - groups.first[group])[owner] + step, count[owner])
        which += groups.first[group][owner]
        moved = np.maximum(groups.place[which] + turn * stride[owner] - begin[owner], 0)
        ends = np.append(moved[1:], 0)[: len(owner)]
        ends = np.where(np.append(owner[1:] != owner[:-1], True)[: len(owner)], length[owner], ends)
        part, low, size = self._heads(groups.entry[which], begin[owner] + moved, ends - moved)
        return owner[part], moved[part] + low, size

    def _heads(self, entry: Ints, begin: Ints, length: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut ranges within pages at heads, for entries with heads first."""
        unit = np.where(self.heads_first, self.unit, self.stride)[entry]
        offset = (begin - self.addr[entry]) % self.stride[entry]
        first = offset // unit
        part, step = _each_page((offset + length - 1) // unit - first + 1)
        low = (first[part] + step) * unit[part] - offset[part]
        high = np.minimum(low + unit[part], length[part])
        low = np.maximum(low, 0)
        return part, low, high - low

    def outside_registered(self, begin: Ints, length: Ints) -> np.ndarray:
        """Return ranges outside of registered memory; none if the document does not state it."""
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
        """Return token and byte for addresses in entries; `pages` are those of a sequence.

        The token is -1 on a page that is not in the list.
        """
        page, within = np.divmod(begin - self.addr[entry], self.stride[entry])
        head, within = np.divmod(within, self.unit[entry])
        row, byte = np.divmod(within, self.step[entry])
        byte += head * self.head_bytes[entry]
        order = np.argsort(pages, kind="stable")
        place = np.searchsorted(pages[order], page)
        known = np.minimum(place, max(len(pages) - 1, 0))
        listed = (pages[order][known] == page) if len(pages) else np.zeros(len(page), bool)
        token = order[known] * self.page_size + row if len(pages) else np.zeros_like(page)
        return np.where(listed, token, -1), byte + self.skipped[entry]


def _each_page(counts: Ints) -> tuple[Ints, Ints]:
    """Return `each` for pages or heads; `Undecided` if there are more than `MOST_PAGES`."""
    if int(counts.sum()) > MOST_PAGES:
        raise Undecided(f"descriptors of more than {MOST_PAGES:,} pages")
    return each(counts)
