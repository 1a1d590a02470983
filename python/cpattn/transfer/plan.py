# SPDX-License-Identifier: Apache-2.0
"""Plan of a transfer: the blocks to copy, and a description of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import _core
from .execute import execute

HEADER = ("part", "layers", "blocks", "bytes", "mean block")


def summary(self: _core.TransferPlan) -> str:
    """Format a table of the plan: its parts, with layers, blocks, bytes and the mean block.

    Returns
    -------
    str
        A line for each kind of buffer (target, then draft, as they occur), and a total.

    Examples
    --------
    >>> print(TransferPlan([0, 64], [4096, 8192], [64, 192]).summary())
    part   layers  blocks  bytes  mean block
    total               2  256 B       128 B
    """
    return table(HEADER, [*rows_of(self), ("total", "", *cells(len(self), self.total_bytes))])


def rows_of(plan: _core.TransferPlan) -> list[tuple[str, ...]]:
    """Return the lines of the parts that have a name."""
    parts: dict[str, list[int]] = {}
    begin = 0
    for name, num_entries, num_blocks in plan.parts:
        end = begin + num_blocks
        sums = parts.setdefault(name, [0, 0, 0])
        for i, value in enumerate((num_entries, num_blocks, int(plan.lengths[begin:end].sum()))):
            sums[i] += value
        begin = end
    return [
        (name, f"{num_layers}", *cells(num_blocks, num_bytes))
        for name, (num_layers, num_blocks, num_bytes) in parts.items()
        if name
    ]


def cells(num_blocks: int, num_bytes: int) -> tuple[str, str, str]:
    """Format blocks, bytes and mean block."""
    mean = num_bytes / num_blocks if num_blocks else 0
    return f"{num_blocks:,}", human_bytes(num_bytes), human_bytes(mean)


def human_bytes(number: float) -> str:
    """Format bytes in the unit that leaves less than 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format columns as narrow as possible, the first left-aligned, others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )


# No subclass like `KVLayout`: the core makes plans and would have to know the subclass. Type
# checkers are told of a subclass, so that they know the methods.
if TYPE_CHECKING:
    from .layout import KVLayout

    _execute, _summary = execute, summary

    class TransferPlan(_core.TransferPlan):
        execute = _execute
        summary = _summary
        layouts: tuple[KVLayout, KVLayout] | None

else:
    TransferPlan = _core.TransferPlan
    TransferPlan.execute, TransferPlan.summary = execute, summary
    TransferPlan.layouts = None  # of a class that keeps the layouts of a planner
    TransferPlan.__module__ = "cpattn.transfer"

TransferPlan.__doc__ = """Blocks to copy from one memory to another.

A plan is a value of three equally long arrays: comparable and picklable; ``len`` counts its blocks.
Planners make plans; other blocks become a plan by their three lists.

Parameters
----------
src_addrs, dst_addrs, lengths : sequences of int
    Source address, destination address and number of bytes of each block.
parts : list of (str, int, int), optional
    Runs of similar blocks, in order: name, such as ``"k"``, number of entries (buffers), and number
    of blocks. Together they cover all blocks.

Attributes
----------
src_addrs, dst_addrs, lengths : array [blocks], uint64
    Read-only.
total_bytes : int
    Sum of ``lengths``.
parts : list of (str, int, int)
    The argument.
layouts : pair of KVLayout, or None
    Source and destination, if a planner had them; pickles drop them.

Raises
------
TypeError
    If a number is no integer, or `parts` is no list of such tuples.
ValueError
    If arrays differ in length, a number is outside [0, 2^64), or parts do not cover all blocks.

Examples
--------
>>> plan = TransferPlan([4096, 8192], [65536, 66560], [512, 1024], [("k", 1, 1), ("v", 1, 1)])
>>> plan
TransferPlan(2 blocks, 1536 bytes, 1 × k, 1 × v)
>>> len(plan), plan.to_dict()["lengths"]
(2, [512, 1024])
"""
