# SPDX-License-Identifier: Apache-2.0
"""XFER: descriptors copy each layer, kind, head and token to its own place, all of it, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...findings import Finding
from ..intervals import Ints, each, first_of, ints, tally
from ..memory import Memory, address, addresses, as_hex
from ..model import Absent, Plan, Undecided
from ..pictures import Bars
from .check import Check, finding, many, more

MOST_PAGES = 10_000_000  # that descriptors copy; more would take gigabytes


@dataclass(frozen=True)
class Link:
    """One transfer: its two memories, the pages of the sequence, and the descriptors."""

    number: int
    source: Memory
    target: Memory
    src_pages: Ints
    dst_pages: Ints
    src: Ints
    dst: Ints
    length: Ints
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"transfer {self.number} from {self.source.name} to {self.target.name}"


def _links(plan: Plan) -> Iterator[Link]:
    if not plan.document.get("transfers"):
        raise Absent("the document has no transfers")
    memories = {name: Memory(name, text) for name, text in plan.document["memories"].items()}
    for number, transfer in enumerate(plan.document["transfers"]):
        arrays = {name: ints(transfer[name]) for name in ("src_pages", "dst_pages", "length")}
        arrays |= {name: addresses(transfer[name]) for name in ("src", "dst")}
        source, target = memories[transfer["from"]], memories[transfer["to"]]
        yield Link(number, source, target, **arrays, document=transfer)


def inside(plan: Plan) -> list[Finding]:
    """Both ends of a descriptor are within one buffer, and within registered memory."""
    for link in _links(plan):
        for side, memory, begin in (
            ("reads", link.source, link.src),
            ("writes", link.target, link.dst),
        ):
            outside = memory.find(begin, link.length) < 0
            for flags, of in (
                (outside, "no buffer has all of it"),
                (memory.outside_registered(begin, link.length), "not all of it is registered"),
            ):
                flags = flags & (link.length > 0)
                bad = first_of(flags)
                if bad is None:
                    continue
                first, end = int(begin[bad]), int(begin[bad] + link.length[bad])
                return finding(
                    "xfer-bounds", f"descriptor {bad} {side} {end - first:,} bytes of "
                    f"{memory.name} from {as_hex(first)}; {of}"
                    + more(int(flags.sum()) - 1, "descriptor"),
                    f"{link.name}, byte {as_hex(first)}", (), _around(memory, first, end),
                    descriptor=bad, begin=address(first), end=address(end), memory=memory.name,
                )  # fmt: skip
    return []


def _around(memory: Memory, begin: int, end: int) -> str:
    """The range, and the buffers next to it."""
    near = np.flatnonzero((memory.addr <= end) & (memory.end >= begin))[:3]
    low = min([begin, *memory.addr[near].tolist()])
    high = max([end, *memory.end[near].tolist()])
    bars = Bars(0, high - low, None)
    bars.add("descriptor", [(begin - low, end - low)])
    for entry in near:
        bars.add(
            memory.label(entry), [(int(memory.addr[entry]) - low, int(memory.end[entry]) - low)]
        )
    return bars.picture(f"bytes from {as_hex(low)}")


def _cut(link: Link) -> tuple[Ints, Ints, Ints, Ints]:
    """Descriptors cut where either side begins another page: number, source, target, length."""
    number = np.flatnonzero(link.length)
    src, dst, length = link.src[number], link.dst[number], link.length[number]
    for memory, at in ((link.source, "src"), (link.target, "dst")):
        begin = src if at == "src" else dst
        entry = np.maximum(memory.find(begin, length), 0)
        item, offset = memory.item_len[entry], begin - memory.addr[entry]
        last = (offset + length - 1) // item
        pages = last - offset // item + 1
        if int(pages.sum()) > MOST_PAGES:
            raise Undecided(f"descriptors of more than {MOST_PAGES:,} pages")
        owner, place = each(pages)
        low = np.maximum((offset // item)[owner] * item[owner] + place * item[owner], offset[owner])
        high = np.minimum(
            ((offset // item)[owner] + place + 1) * item[owner], (offset + length)[owner]
        )
        moved = low - offset[owner]
        number, src, dst = number[owner], src[owner] + moved, dst[owner] + moved
        length = high - low
    return number, src, dst, length


def paired(plan: Plan) -> list[Finding]:
    """What is read is what the place that is written to is for."""
    for link in _links(plan):
        known = (link.source.find(link.src, link.length) >= 0) & (
            link.target.find(link.dst, link.length) >= 0
        )
        if not known[link.length > 0].all():
            raise Absent("descriptors are outside of buffers")
        number, src, dst, length = _cut(link)
        ours, theirs = link.source.find(src, length), link.target.find(dst, length)
        names = {key: i for i, key in enumerate({*link.source.keys, *link.target.keys})}
        one = ints([names[key] for key in link.source.keys])[ours]
        two = ints([names[key] for key in link.target.keys])[theirs]
        bad = first_of(one != two)
        if bad is not None:
            read, written = link.source.label(ours[bad]), link.target.label(theirs[bad])
            wrong = len(np.unique(number[one != two]))
            return finding(
                "xfer-pair", f"descriptor {number[bad]} writes {read} into {written}"
                + more(wrong - 1, "descriptor"), f"{link.name}, byte {as_hex(dst[bad])}", (),
                f"{link.source.name}  {read}  {as_hex(src[bad])}\n"
                f"{link.target.name}  {written}  {as_hex(dst[bad])}",
                descriptor=number[bad], read=read, written=written,
            )  # fmt: skip
        if fault := _rows(link, number, src, dst, length, ours, theirs):
            return fault
    return []


def _rows(
    link: Link, number: Ints, src: Ints, dst: Ints, length: Ints, ours: Ints, theirs: Ints
) -> list[Finding]:
    """Tokens and heads are the same on both sides, from the first byte to the last."""
    read, read_byte = link.source.meaning(ours, src, link.src_pages)
    written, written_byte = link.target.meaning(theirs, dst, link.dst_pages)
    bad = first_of((read < 0) | (written < 0))
    if bad is not None:
        memory, entry = (link.source, ours) if read[bad] < 0 else (link.target, theirs)
        at = src if read[bad] < 0 else dst
        page = int((at[bad] - memory.addr[entry[bad]]) // memory.item_len[entry[bad]])
        side = "reads" if read[bad] < 0 else "writes"
        return finding(
            "xfer-page", f"descriptor {number[bad]} {side} page {page} of {memory.name}, which is "
            "none of the sequence", f"{link.name}, byte {as_hex(at[bad])}", (),
            _around(memory, int(at[bad]), int(at[bad] + length[bad])), descriptor=number[bad],
            page=page,
        )  # fmt: skip
    alike = link.source.row_bytes[ours] == link.target.row_bytes[theirs]
    crosses = ~alike & (
        (read_byte - link.source.skipped[ours] + length > link.source.row_bytes[ours])
        | (written_byte - link.target.skipped[theirs] + length > link.target.row_bytes[theirs])
    )
    bad = first_of((read != written) | (read_byte != written_byte) | crosses)
    if bad is None:
        return []
    place = f"token {read[bad]}, byte {read_byte[bad]}"
    other = f"token {written[bad]}, byte {written_byte[bad]}"
    what = f"descriptor {number[bad]} writes {place} to the place of {other}"
    if place == other:
        rows = f"{link.source.row_bytes[ours[bad]]} and {link.target.row_bytes[theirs[bad]]}"
        what = f"descriptor {number[bad]} copies {length[bad]} bytes over rows of {rows} bytes"
    return finding(
        "xfer-row", what,
        f"{link.name}, {link.source.label(ours[bad])}, byte {as_hex(dst[bad])}", (),
        f"{link.source.name}  {as_hex(src[bad])}  {place}\n"
        f"{link.target.name}  {as_hex(dst[bad])}  {other}",
        descriptor=number[bad], token=read[bad], expected=written[bad],
    )  # fmt: skip


def disjoint(plan: Plan) -> list[Finding]:
    """No byte of a receiver is written twice, over all transfers."""
    for target, links in _by_target(plan).items():
        begin = np.concatenate([link.dst for link in links])
        length = np.concatenate([link.length for link in links])
        edges, counts = tally(begin, begin + length)
        bad = first_of(counts > 1)
        if bad is not None:
            byte = int(edges[bad])
            number = np.concatenate([np.arange(len(link.dst)) for link in links])
            owner = np.concatenate([np.full(len(link.dst), link.number) for link in links])
            both = np.flatnonzero((begin <= byte) & (byte < begin + length))[:4]
            low = int(begin[both].min())
            bars = Bars(0, int((begin + length)[both].max()) - low, byte - low)
            for one in both:
                name = f"transfer {owner[one]}, descriptor {number[one]}"
                bars.add(name, [(int(begin[one]) - low, int((begin + length)[one]) - low)])
            again = int((np.diff(edges) * np.maximum(counts[:-1] - 1, 0)).sum())
            return finding(
                "xfer-overlap", f"{again:,} bytes of {target} are written more than once, "
                f"this one {counts[bad]} times", f"{target}, byte {as_hex(byte)}", (),
                bars.picture(f"bytes from {as_hex(low)}"), byte=address(byte),
                times=counts[bad], bytes=again,
            )  # fmt: skip
    return []


def complete(plan: Plan) -> list[Finding]:
    """The receiver gets every byte of its pages, of all that senders have."""
    for links in _by_target(plan).values():
        if any(link.document.get("partial") for link in links):
            raise Absent("transfers are partial")
        for link in links:
            if fault := _too_few_pages(link):
                return fault
        target = links[0].target
        sent = {key for link in links for key in link.source.keys}
        wanted = [i for i, key in enumerate(target.keys) if key in sent]
        begin, end, entry = _needed(target, wanted, links)
        dst = np.concatenate([link.dst for link in links])
        length = np.concatenate([link.length for link in links])
        ranges = list(zip(begin.tolist(), end.tolist(), strict=True))
        edges, counts = tally(dst, dst + length, ranges)
        bad = first_of(counts < 0)
        if bad is not None:
            byte = int(edges[bad])
            at = int(np.flatnonzero((begin <= byte) & (byte < end))[0])
            page = int((begin[at] - target.addr[entry[at]]) // target.item_len[entry[at]])
            lost = int((np.diff(edges) * (counts[:-1] < 0)).sum())
            return finding(
                "xfer-missing", f"{lost:,} bytes of {target.name} are never written, first of "
                f"{target.label(entry[at])}, page {page}", f"{target.name}, byte {as_hex(byte)}",
                byte=address(byte), bytes=lost, page=page,
            )  # fmt: skip
    return []


def _too_few_pages(link: Link) -> list[Finding]:
    """A sequence that is longer than its pages."""
    tokens = link.document.get("tokens", 0)
    for memory, pages in ((link.source, link.src_pages), (link.target, link.dst_pages)):
        room = len(pages) * memory.page_size
        if tokens > room:
            return finding(
                "xfer-missing", f"{tokens:,} tokens are sent, of which {many(len(pages), 'page')} "
                f"of {memory.name} can hold {room:,}", f"{link.name}, token {room}",
                tokens=tokens, room=room, memory=memory.name,
            )  # fmt: skip
    return []


def _needed(target: Memory, entries: list[int], links: list[Link]) -> tuple[Ints, Ints, Ints]:
    """The bytes that have to come: of each entry and page, up to the last token."""
    pages: dict[int, int] = {}  # with the tokens that are wanted of each
    for link in links:
        tokens = link.document.get("tokens", len(link.dst_pages) * target.page_size)
        for place, page in enumerate(link.dst_pages.tolist()):
            count = min(max(tokens - place * target.page_size, 0), target.page_size)
            pages[page] = max(pages.get(page, 0), count)
    page, count = ints(list(pages)), ints(list(pages.values()))
    if len(page) * len(entries) > MOST_PAGES:
        raise Undecided(f"buffers of more than {MOST_PAGES:,} pages")
    entry = np.repeat(ints(entries), len(page))
    have = (target.end - target.addr)[entry] // target.item_len[entry]
    begin = (
        target.addr[entry] + np.minimum(np.tile(page, len(entries)), have) * target.item_len[entry]
    )
    whole = np.tile(count, len(entries)) == target.page_size
    rows = np.tile(count, len(entries)) * target.row_bytes[entry]
    return begin, begin + np.where(whole, target.item_len[entry], rows), entry


def _by_target(plan: Plan) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in _links(plan):
        found.setdefault(link.target.name, []).append(link)
    return found


def items(plan: Plan) -> list[Finding]:
    """A buffer is a whole number of pages, and no two of a memory overlap."""
    for link in _links(plan):
        for memory in (link.source, link.target):
            bad = first_of((memory.end - memory.addr) % memory.item_len)
            if bad is not None:
                size = int(memory.end[bad] - memory.addr[bad])
                return finding(
                    "xfer-item", f"{memory.label(bad)} of {memory.name} has {size:,} bytes, no "
                    f"whole number of pages of {memory.item_len[bad]:,}",
                    f"{memory.name}, byte {as_hex(memory.addr[bad])}", nbytes=size,
                    item_len=memory.item_len[bad],
                )  # fmt: skip
            if fault := _pages(memory):
                return fault
            bad = first_of(memory.end[:-1] > memory.addr[1:])
            if bad is not None:
                return finding(
                    "xfer-item", f"{memory.label(bad)} and {memory.label(bad + 1)} of "
                    f"{memory.name} have memory in common",
                    f"{memory.name}, byte {as_hex(memory.addr[bad + 1])}",
                    entries=[memory.label(bad), memory.label(bad + 1)],
                )  # fmt: skip
    return []


def _pages(memory: Memory) -> list[Finding]:
    """Where it is said how many pages buffers have, all of them have so many."""
    if "num_pages" not in memory.document:
        return []
    wanted = int(memory.document["num_pages"])
    have = (memory.end - memory.addr) // memory.item_len
    bad = first_of(have != wanted)
    if bad is None:
        return []
    return finding(
        "xfer-item", f"{memory.label(bad)} of {memory.name} has {have[bad]:,} pages of "
        f"{memory.item_len[bad]:,} bytes, not {wanted:,}",
        f"{memory.name}, byte {as_hex(memory.addr[bad])}", pages=have[bad], expected=wanted,
        item_len=memory.item_len[bad],
    )  # fmt: skip


CHECKS = (
    Check("XFER", "buffers", items),
    Check("XFER", "bounds", inside),
    Check("XFER", "pairing", paired),
    Check("XFER", "overlaps", disjoint),
    Check("XFER", "completeness", complete),
)
