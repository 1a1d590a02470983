# SPDX-License-Identifier: Apache-2.0
"""Switches for deviations of an operator from correct attention, one each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from .cases import Case


@dataclass(frozen=True)
class Switches:
    """Positions of switches; the defaults give correct attention.

    Attributes
    ----------
    mask : {"bottom right", "top left", "none"}
        Corner of the causal mask at which the last query and the last key meet.
    chunk, chunk_mask : int, {"", "top left", "bottom right", "prefix", "own keys"}
        Rows of queries per chunk. Each chunk has a causal mask of its own, which begins at the
        first key or after the prefix, or ends at the last key of all; or a chunk sees only its own
        keys.
    mask_shift, window_shift, window_right_shift : int
        Keys visible past a query's own; keys hidden at both ends of the window.
    window, window_right : bool
        Whether there are windows, and right sides of them.
    window_block : {"", "page"} or a number
        Windows begin with the block of so many keys that contains their first key.
    alibi : {"right", "none", "before scale", "top left"}
        "before scale": added to products; "top left": query i stands at key i.
    scale : {"given", "none", "twice", "root"}
        "root": 1 / sqrt(head_dim) instead of any given scale.
    softcap : {"after scale", "before scale", "none"}
        Scores in the hyperbolic tangent.
    sinks : {"once", "none"}
        Whether sinks count.
    sink_count : int
        Number of times that a part counts the sink.
    split : str, optional
        Borders of merged parts: "new" between prefix and new tokens, "half" of the keys, or of
        those that the longest sequence is padded to, "page", or a number of keys.
    merge_factor : float
        Factor of LSE before the merge takes them as exponents of e.
    merge_swapped : bool
        Whether the next part gets the weight of the merged result, and vice versa.
    lse : str
        "right", "with sink", "unscaled", "unscaled maximum"; or for a row that sees no key "nan on
        empty", "free on empty", which is any finite number, or "any on empty".
    lse_factor : float
        Factor of the LSE, such as that of another base.
    heads : {"grouped", "strided"}
        Whether query heads of one KV head are adjacent.
    nan_of_empty_part : {"", "some", "any", "first", "later", "masked"}
        NaN of merged rows for which some parts but not all, any parts, the first or one of the
        later parts have no key; or a part has keys that are all "masked".
    empty : {"zero", "nan", "mean"}
        Output of rows that see no key; the mean is over the values of all keys that are read.
    lengths : {"all", "without new", "without new, aligned", "first", "last"}
        Keys of a sequence that are read: those before the new ones, with or without moving the
        queries along; or as many as it has new tokens, from the begin or the end.
    beyond : {"", "one", "page", "all"}
        Slots read after the last key; `beyond_aligned`: whether they count as keys before the last
        query.
    zero_times_nan : bool
        Whether values without weight are still multiplied.
    table : {"right", "ignored", "sorted", "reversed", "first page alone"}
        Pages that are read for a sequence.
    page_size, page_stride
        "right", "half", "double" or a number; and whether the distance of pages changes, too.
    order : str
        Sequence whose keys are read: "right", or "reversed", "rolled" or "longest first", which may
        go "with lengths".
    values : {"right", "of key dim", "padded to key dim"}
        Assumed dimension of values.
    layout : {"right", "swapped"}
        Whether NHD and HND are confused.
    pads : {"", "queries", "keys"}
        Whether padding rows count as queries of the last sequence, or have keys.
    accumulator : str, optional
        Dtype of the sum over keys.
    """

    mask: str = "bottom right"
    chunk: int = 0
    chunk_mask: str = ""
    mask_shift: int = 0
    window: bool = True
    window_shift: int = 0
    window_right: bool = True
    window_right_shift: int = 0
    window_block: str = ""
    alibi: str = "right"
    scale: str = "given"
    softcap: str = "after scale"
    sinks: str = "once"
    sink_count: int = 1
    split: str | None = None
    merge_factor: float = 1.0
    merge_swapped: bool = False
    nan_of_empty_part: str = ""
    empty: str = "zero"
    lse: str = "right"
    lse_factor: float = 1.0
    heads: str = "grouped"
    lengths: str = "all"
    beyond: str = ""
    beyond_aligned: bool = False
    zero_times_nan: bool = False
    pads: str = ""
    table: str = "right"
    page_size: str = "right"
    page_stride: str = "same"
    order: str = "right"
    values: str = "right"
    layout: str = "right"
    accumulator: str | None = None


RIGHT = Switches()


@cache
def changed_by(switches: Switches) -> Mapping[str, Any]:
    """Return the positions of a wrong oracle that differ from the correct one."""
    values = {field.name: getattr(switches, field.name) for field in fields(switches)}
    return {name: value for name, value in values.items() if value != getattr(RIGHT, name)}


def can_matter(switches: Switches, case: Case) -> bool:
    """Tell whether a wrong oracle may differ from the correct one on a case; saves most work."""
    return any(_NEEDS.get(name, _always)(case) for name in changed_by(switches))


def _always(case: Case) -> bool:
    return True


def _is_masked(case: Case) -> bool:
    return case.causal or _has_window(case)


def _is_paged(case: Case) -> bool:
    return case.layout == "paged"


def _has_window(case: Case) -> bool:
    return case.window is not None or case.window_right is not None


def _has_right_side(case: Case) -> bool:
    return case.window_right is not None


def _has_sinks(case: Case) -> bool:
    return case.sinks


#: Conditions on a case under which a switch matters; others always matter.
_NEEDS: dict[str, Callable[[Case], bool]] = {
    **dict.fromkeys(("mask", "mask_shift", "chunk", "chunk_mask"), _is_masked),
    **dict.fromkeys(("window", "window_shift", "window_block"), _has_window),
    **dict.fromkeys(("table", "page_size", "page_stride", "layout"), _is_paged),
    **dict.fromkeys(("sinks", "sink_count", "split"), _has_sinks),
    **dict.fromkeys(("window_right", "window_right_shift"), _has_right_side),
    "alibi": lambda case: case.alibi,
    "softcap": lambda case: case.softcap != 0,
    "heads": lambda case: 1 < case.num_kv_heads < case.num_heads,
    "values": lambda case: case.head_dim != case.v_head_dim,
    "order": lambda case: len(case.q_lens) > 1,
    "pads": lambda case: case.pad_rows > 0,
}
