# SPDX-License-Identifier: Apache-2.0
"""ADDR: buffers are as large as what goes into them, and offsets fit into their integers."""

from __future__ import annotations

from ...findings import Finding
from ..model import Absent, Plan
from ..pictures import Bars
from .check import Check, finding


def _bars(end: int, *lines: tuple[str, int]) -> str:
    """Bars from 0 up to numbers."""
    bars = Bars(0, end + 1)
    for name, count in lines:
        bars.add(name, [(0, count)])
    return bars.picture()


def buffers(plan: Plan) -> list[Finding]:
    """No buffer takes more than it has room for."""
    if not any("buffers" in rank for rank in plan.ranks):
        raise Absent("no rank has buffers")
    for number, rank in enumerate(plan.ranks):
        for buffer in rank.get("buffers", ()):
            name, used, size = buffer["name"], buffer["used"], buffer["size"]
            if used > size:
                return finding(
                    "addr-buffer", f"rank {number} puts {used} elements into {name}, which has "
                    f"{size}", f"{name}, element {size}", [number],
                    _bars(used, ("room", size), ("used", used)), used=used, size=size, name=name,
                )  # fmt: skip
    return []


def products(plan: Plan) -> list[Finding]:
    """No offset overflows the integers that it is computed in."""
    if not any("products" in rank for rank in plan.ranks):
        raise Absent("no rank has products")
    for number, rank in enumerate(plan.ranks):
        for product in rank.get("products", ()):
            index, stride, bits = product["index"], product["stride"], product["bits"]
            limit = 2 ** (bits - 1) - 1
            if index * stride > limit:
                largest = limit // stride
                return finding(
                    "addr-overflow", f"{product['name']} of {index} times {stride} is "
                    f"{index * stride:,}, {bits} bits have {limit:,} at most",
                    f"{product['name']}, index {largest + 1}", [number],
                    _bars(index, ("fits", largest + 1), ("used", index + 1)),
                    name=product["name"], index=index, stride=stride, first=largest + 1, bits=bits,
                )  # fmt: skip
    return []


CHECKS = (
    Check("ADDR", "buffers", buffers),
    Check("ADDR", "products", products),
)
