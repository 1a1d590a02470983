# SPDX-License-Identifier: Apache-2.0
"""What an operator may do otherwise than it should, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Switches:
    """As by default, attention is right.

    Attributes
    ----------
    mask : {"bottom right", "top left", "none"}
        Which corner of the causal mask is that of the last query and the last key.
    mask_shift, window_shift : int
        Keys that are seen past a query's own; keys of the window that are not.
    scale : {"given", "none", "twice", "root"}
        "root": 1 / sqrt(head_dim), whatever is given.
    softcap : {"after scale", "before scale", "none"}
        Of what the hyperbolic tangent is taken.
    sinks : {"once", "none"}
        Whether they count.
    sink_count : int
        How often the sink is counted in a part.
    split : str, optional
        Where results of parts are merged: "new" between prefix and new tokens, "half", "page", or
        a number of keys.
    merge_factor : float
        LSE are multiplied with it before the merge takes them as exponents of e.
    lse : str
        "right", "with sink", "unscaled", "unscaled maximum"; or for a row that sees no key "nan on
        empty", "free on empty", which is any finite number, or "any on empty".
    lse_factor : float
        Of another base.
    heads : {"grouped", "strided"}
        Whether query heads of one KV head are neighbours.
    nan_of_empty_part : {"", "some", "any", "first", "later"}
        NaN of merged rows for which some parts but not all, any parts, the first or one of the
        later parts have no key.
    nan_on_empty : bool
        NaN where there is no key at all.
    lengths : {"all", "without new", "without new, aligned", "first", "last"}
        Which of a sequence's keys are read: those before the new ones, with or without queries
        moving along; as many as it has new tokens, from the begin or the end.
    beyond : {"", "one", "page", "all"}
        What is read after the last key; `beyond_aligned`: and counts as keys before the last query.
    zero_times_nan : bool
        Values that have no weight are still multiplied.
    table : {"right", "ignored", "sorted", "reversed", "first page alone"}
        Which pages are taken for those of a sequence.
    page_size, page_stride
        "right", "half", "double" or a number; and whether pages are so far apart, too.
    order : str
        Whose keys a sequence reads: "right", or "reversed", "rolled" or "longest first", which may
        go "with lengths".
    values : {"right", "of key dim", "padded to key dim"}
        The dimension that values are taken to have.
    layout : {"right", "swapped"}
        Whether NHD is taken for HND.
    pads : {"", "queries", "keys"}
        Rows of padding that count as queries of the last sequence, or have keys.
    accumulator : str, optional
        The dtype of the sum over keys.
    """

    mask: str = "bottom right"
    mask_shift: int = 0
    window: bool = True
    window_shift: int = 0
    scale: str = "given"
    softcap: str = "after scale"
    sinks: str = "once"
    sink_count: int = 1
    split: str | None = None
    merge_factor: float = 1.0
    nan_of_empty_part: str = ""
    nan_on_empty: bool = False
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
