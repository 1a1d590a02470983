# SPDX-License-Identifier: Apache-2.0
"""LAYOUT: writer and reader of a buffer agree on the order of its bytes.

A side's order lists its axes from the outermost; a tiled axis appears in several pieces. The place
of an element is a sum over axes, so two sides agree on all elements if they agree on each axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...findings import Finding
from ..intervals import Ints
from ..model import Absent, Plan, Undecided
from .check import Check, finding, many

_MOST = 2**22  # indices of an axis


class _Side(NamedTuple):
    """One side of a buffer."""

    name: str  # as in findings
    document: Mapping[str, Any]

    @property
    def extents(self) -> dict[str, int]:
        """Number of indices of each axis, in the order of first occurrence."""
        found: dict[str, int] = {}
        for piece in self.document["axes"]:
            found[piece["axis"]] = found.get(piece["axis"], 1) * piece["size"]
        return found

    @property
    def places(self) -> dict[str, Ints]:
        """Return bytes from the first element to each index of an axis."""
        step = self.document.get("itemsize", 1)
        extents = self.extents
        places = {axis: np.zeros(extent, np.int64) for axis, extent in extents.items()}
        inner = dict.fromkeys(extents, 1)
        for piece in reversed(self.document["axes"]):
            axis, size = piece["axis"], piece["size"]
            stride = piece.get("stride", step)
            places[axis] += np.arange(extents[axis]) // inner[axis] % size * stride
            inner[axis] *= size
            step = stride * size
        return places

    @property
    def order(self) -> str:
        """Return axes from the outermost, such as ``token/4 dim/8 token/16 dim/16``."""
        return " ".join(f"{piece['axis']}/{piece['size']}" for piece in self.document["axes"])


def _pairs(plan: Plan) -> Iterator[tuple[str, _Side, _Side]]:
    layouts = plan.document.get("layouts")
    if not layouts:
        raise Absent("the document has no layouts")
    for layout in layouts:
        writer, reader = layout["writer"], layout["reader"]
        yield (
            layout["buffer"],
            _Side(writer.get("by", "the writer"), writer),
            _Side(reader.get("by", "the reader"), reader),
        )


def orders(plan: Plan) -> list[Finding]:
    """Check that every element is read where it was written."""
    for buffer, writer, reader in _pairs(plan):
        theirs = reader.extents
        for axis, extent in writer.extents.items():
            if extent > _MOST:
                raise Undecided(f"{axis} of {buffer} has {extent:,} indices, of {_MOST:,} at most")
            if extent != theirs.get(axis):
                taken = many(theirs[axis], axis) if axis in theirs else f"no {axis} at all"
                return finding(
                    "layout-extent", f"{writer.name} writes {many(extent, axis)} of {buffer}, "
                    f"{reader.name} reads {taken}", buffer, (), _picture(writer, reader),
                    axis=axis, written=extent, read=theirs.get(axis, 0),
                )  # fmt: skip
        if other := [axis for axis in theirs if axis not in writer.extents]:
            return finding(
                "layout-extent", f"{reader.name} reads {many(theirs[other[0]], other[0])} of "
                f"{buffer}, {writer.name} writes no {other[0]} at all", buffer, (),
                _picture(writer, reader), axis=other[0], written=0, read=theirs[other[0]],
            )  # fmt: skip
        if fault := _first_apart(buffer, writer, reader):
            return fault
    return []


def _first_apart(buffer: str, writer: _Side, reader: _Side) -> list[Finding]:
    """Return the first element, in the writer's order, with different places."""
    written, read = writer.places, reader.places
    begins = [side.document.get("offset", 0) for side in (writer, reader)]
    apart = [axis for axis in written if (written[axis] != read[axis]).any()]
    if begins[0] == begins[1] and not apart:
        return []
    index = dict.fromkeys(written, 0)
    places = list(begins)
    if begins[0] == begins[1]:  # else it is the very first element
        axis = apart[-1]
        index[axis] = int(np.flatnonzero(written[axis] != read[axis])[0])
        places = [
            begins[i] + int(side[axis][index[axis]]) for i, side in enumerate((written, read))
        ]
    element = ", ".join(f"{axis} {i}" for axis, i in index.items())
    return finding(
        "layout-order", f"{writer.name} writes {element} of {buffer} to byte {places[0]}, "
        f"{reader.name} reads it from byte {places[1]}", f"{buffer}, byte {places[1]}", (),
        _picture(writer, reader), element=[*index.values()], written=places[0], read=places[1],
    )  # fmt: skip


def _picture(writer: _Side, reader: _Side) -> str:
    width = max(len(writer.name), len(reader.name))
    return "\n".join(f"{side.name:{width}}  {side.order}" for side in (writer, reader))


def codes(plan: Plan) -> list[Finding]:
    """Check that elements have one dtype, and their scales one granularity."""
    for buffer, writer, reader in _pairs(plan):
        types = [side.document.get("dtype", "") for side in (writer, reader)]
        if all(types) and types[0] != types[1]:
            return finding(
                "layout-dtype", f"{writer.name} writes {types[0]} to {buffer}, {reader.name} reads "
                f"{types[1]}", buffer, (), "", written=types[0], read=types[1],
            )  # fmt: skip
        if not all("scales" in side.document for side in (writer, reader)):
            continue
        scales = [sorted(side.document["scales"]) for side in (writer, reader)]
        if scales[0] != scales[1]:
            each = [f"each {' and '.join(axes)}" if axes else "all of it" for axes in scales]
            return finding(
                "layout-scale", f"{writer.name} writes a scale of {buffer} for {each[0]}, "
                f"{reader.name} takes one for {each[1]}", buffer, (), "",
                written=scales[0], read=scales[1],
            )  # fmt: skip
    return []


def tags(plan: Plan) -> list[Finding]:
    """Check that unconverted bytes have the same layout name and dtype on both sides."""
    memories = plan.document.get("memories", {})
    said = False
    for number, transfer in enumerate(plan.document.get("transfers", ())):
        sides = [memories[transfer[side]]["entries"] for side in ("from", "to")]
        source, target = ({_key(entry): entry for entry in entries} for entries in sides)
        for key, sent in source.items():
            for name, default in (("layout_tag", "rows"), ("dtype", "")):
                taken = target.get(key, {})
                if name not in sent and name not in taken:
                    continue
                said = True
                one, two = sent.get(name, default), taken.get(name, default)
                if key not in target or one == two or "" in (one, two):
                    continue
                layer, kind, draft = key
                label = f"{kind} of {'draft ' if draft else ''}layer {layer}"
                kind_of_fault = "layout-tag" if name == "layout_tag" else "layout-dtype"
                return finding(
                    kind_of_fault, f"{label} of {transfer['from']} is {one}, that of "
                    f"{transfer['to']} is {two}, and bytes are sent as they are",
                    f"transfer {number}, {label}", (), "", written=one, read=two,
                )  # fmt: skip
    if not said:
        raise Absent("no memory has layout_tag or dtype")
    return []


def _key(entry: Mapping[str, Any]) -> tuple[int, str, bool]:
    return entry["layer"], entry["kind"], entry.get("draft", False)


CHECKS = (
    Check("LAYOUT", "orders", orders),
    Check("LAYOUT", "codes", codes),
    Check("LAYOUT", "tags", tags),
)
