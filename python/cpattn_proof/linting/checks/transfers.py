# SPDX-License-Identifier: Apache-2.0
"""XFER: descriptors copy each layer, kind, head and token completely, once, to its own place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...findings import Finding
from ..intervals import Ints, each, first_of, ints, tally
from ..memory import MOST_PAGES, Memory, address, addresses, as_hex
from ..model import Absent, Plan, Undecided
from ..pictures import Bars
from .check import Check, finding, many, more


@dataclass(frozen=True)
class Link:
    """One transfer: two memories, the pages of the sequence, and the descriptors."""

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
    """Check that both ends of a descriptor are within one buffer, and within registered memory."""
    for link in _links(plan):
        for side, memory, begin in (
            ("reads", link.source, link.src),
            ("writes", link.target, link.dst),
        ):
            outside = ~memory.has(begin, link.length)
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
    """Return the range, and the neighbouring buffers."""
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
    """Return descriptors cut at pages and heads: number, source, target, length."""
    number = np.flatnonzero(link.length)
    src, dst, length = link.src[number], link.dst[number], link.length[number]
    for memory, at in ((link.source, "src"), (link.target, "dst")):
        owner, moved, length = memory.cut(src if at == "src" else dst, length)
        number, src, dst = number[owner], src[owner] + moved, dst[owner] + moved
    return number, src, dst, length


def paired(plan: Plan) -> list[Finding]:
    """Check that each descriptor's source and target have the same meaning."""
    for link in _links(plan):
        known = link.source.has(link.src, link.length) & link.target.has(link.dst, link.length)
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
    """Check that tokens and heads agree on both sides, from the first byte to the last."""
    read, read_byte = link.source.meaning(ours, src, link.src_pages)
    written, written_byte = link.target.meaning(theirs, dst, link.dst_pages)
    bad = first_of((read < 0) | (written < 0))
    if bad is not None:
        memory, entry = (link.source, ours) if read[bad] < 0 else (link.target, theirs)
        at = src if read[bad] < 0 else dst
        page = int((at[bad] - memory.addr[entry[bad]]) // memory.stride[entry[bad]])
        side = "reads" if read[bad] < 0 else "writes"
        return finding(
            "xfer-page", f"descriptor {number[bad]} {side} page {page} of {memory.name}, which is "
            "none of the sequence", f"{link.name}, byte {as_hex(at[bad])}", (),
            _around(memory, int(at[bad]), int(at[bad] + length[bad])), descriptor=number[bad],
            page=page,
        )  # fmt: skip
    ours_step, theirs_step = link.source.step[ours], link.target.step[theirs]
    crosses = (ours_step != theirs_step) & (
        ((read_byte - link.source.skipped[ours]) % ours_step + length > ours_step)
        | ((written_byte - link.target.skipped[theirs]) % theirs_step + length > theirs_step)
    )
    bad = first_of((read != written) | (read_byte != written_byte) | crosses)
    if bad is None:
        return []
    place = f"token {read[bad]}, byte {read_byte[bad]}"
    other = f"token {written[bad]}, byte {written_byte[bad]}"
    what = f"descriptor {number[bad]} writes {place} to the place of {other}"
    if place == other:
        rows, size = f"{ours_step[bad]} and {theirs_step[bad]}", link.length[number[bad]]
        what = f"descriptor {number[bad]} copies {size} bytes over rows of {rows} bytes"
    return finding(
        "xfer-row", what,
        f"{link.name}, {link.source.label(ours[bad])}, byte {as_hex(dst[bad])}", (),
        f"{link.source.name}  {as_hex(src[bad])}  {place}\n"
        f"{link.target.name}  {as_hex(dst[bad])}  {other}",
        descriptor=number[bad], token=read[bad], expected=written[bad],
    )  # fmt: skip


def disjoint(plan: Plan) -> list[Finding]:
    """Check that no byte of a receiver is written twice, over all transfers."""
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
    """Check that the receiver gets every byte of its pages that the senders have."""
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
            page = int((begin[at] - target.addr[entry[at]]) // target.stride[entry[at]])
            lost = int((np.diff(edges) * (counts[:-1] < 0)).sum())
            return finding(
                "xfer-missing", f"{lost:,} bytes of {target.name} are never written, first of "
                f"{target.label(entry[at])}, page {page}", f"{target.name}, byte {as_hex(byte)}",
                byte=address(byte), bytes=lost, page=page,
            )  # fmt: skip
    return []


def _too_few_pages(link: Link) -> list[Finding]:
    """Report a sequence that is longer than its pages."""
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
    """Return the required bytes of each entry and page, up to the last token."""
    pages: dict[int, int] = {}  # with the required tokens of each
    for link in links:
        tokens = link.document.get("tokens", len(link.dst_pages) * target.page_size)
        for place, page in enumerate(link.dst_pages.tolist()):
            count = min(max(tokens - place * target.page_size, 0), target.page_size)
            pages[page] = max(pages.get(page, 0), count)
    page, count = ints(list(pages)), ints(list(pages.values()))
    if len(page) * len(entries) > MOST_PAGES:
        raise Undecided(f"buffers of more than {MOST_PAGES:,} pages")
    entry = np.repeat(ints(entries), len(page))
    page, count = np.tile(page, len(entries)), np.tile(count, len(entries))
    page = np.minimum(page, target.num_pages[entry])
    whole = count == target.page_size
    owner, head = each(np.where(whole | ~target.heads_first[entry], 1, target.heads[1][entry]))
    begin, entry = (target.addr[entry] + page * target.stride[entry])[owner], entry[owner]
    begin += head * target.unit[entry]
    size = np.where(whole[owner], target.item_len[entry], count[owner] * target.step[entry])
    return begin, begin + size, entry


def _by_target(plan: Plan) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in _links(plan):
        found.setdefault(link.target.name, []).append(link)
    return found


def items(plan: Plan) -> list[Finding]:
    """Check that each buffer is a whole number of pages, and no two of a memory overlap."""
    for link in _links(plan):
        for memory in (link.source, link.target):
            bad = first_of(
                ((memory.end - memory.addr - memory.item_len) % memory.stride != 0)
                | (memory.stride < memory.item_len)
            )
            if bad is not None:
                size, item, stride = (
                    int(values[bad])
                    for values in (memory.end - memory.addr, memory.item_len, memory.stride)
                )
                return finding(
                    "xfer-item", f"{memory.label(bad)} of {memory.name} has {size:,} bytes, no "
                    f"whole number of pages of {item:,}"
                    + (f" every {stride:,}" if stride != item else ""),
                    f"{memory.name}, byte {as_hex(memory.addr[bad])}", nbytes=size, item_len=item,
                )  # fmt: skip
            if fault := _pages(memory) or _heads(memory):
                return fault
            if pair := memory.overlap():
                one, two = map(memory.label, pair)
                return finding(
                    "xfer-item", f"{one} and {two} of {memory.name} have memory in common",
                    f"{memory.name}, byte {as_hex(memory.addr[pair[1]])}", entries=[one, two],
                )  # fmt: skip
    return []


def _pages(memory: Memory) -> list[Finding]:
    """Check that every buffer has `num_pages` pages, if the document states the number."""
    if "num_pages" not in memory.document:
        return []
    wanted = int(memory.document["num_pages"])
    have = memory.num_pages
    bad = first_of(have != wanted)
    if bad is None:
        return []
    return finding(
        "xfer-item", f"{memory.label(bad)} of {memory.name} has {have[bad]:,} pages of "
        f"{memory.item_len[bad]:,} bytes, not {wanted:,}",
        f"{memory.name}, byte {as_hex(memory.addr[bad])}", pages=have[bad], expected=wanted,
        item_len=memory.item_len[bad],
    )  # fmt: skip


def _heads(memory: Memory) -> list[Finding]:
    """Check that pages with heads first have a row for each head and token."""
    rows = memory.page_size * memory.heads[1]
    bad = first_of(memory.heads_first & (memory.item_len % rows != 0))
    if bad is None:
        return []
    item, heads = int(memory.item_len[bad]), int(memory.heads[1][bad])
    return finding(
        "xfer-item", f"{memory.label(bad)} of {memory.name} has pages of {item:,} bytes, no whole "
        f"number for each of {memory.page_size:,} tokens and {many(heads, 'head')}",
        f"{memory.name}, byte {as_hex(memory.addr[bad])}", item_len=item, heads=heads,
    )  # fmt: skip


CHECKS = (
    Check("XFER", "buffers", items),
    Check("XFER", "bounds", inside),
    Check("XFER", "pairing", paired),
    Check("XFER", "overlaps", disjoint),
    Check("XFER", "completeness", complete),
)
