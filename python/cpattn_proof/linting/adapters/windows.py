# SPDX-License-Identifier: Apache-2.0
"""Attention calls with a window, in the form of documents."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ..intervals import Ints, each, ints

#: Number of visible keys before a query's own, or before and behind; None for all of a side.
Window: TypeAlias = int | tuple[int | None, int | None] | None


def attention_rule(window: Window, *, causal: bool) -> dict[str, Any]:
    """Return the part ``attention`` of a document, the rule of visible keys; default: all keys."""
    left, right = window if isinstance(window, tuple) else (window, None)
    rule = {
        "causal": None if causal else False,
        "window": left,
        "window_right": None if causal else right,
    }
    return {name: value for name, value in rule.items() if value is not None}


def pass_window(document: dict[str, Any], window: Window, *, causal: bool) -> None:
    """Change a document of causal calls to calls with a window, or without causality.

    A row of a non-causal call keeps the position of its causal call. Rows whose window ends before
    the last key of their sequence see one key more from row to row, others all up to the last.
    """
    rule = attention_rule(window, causal=causal)
    if not rule:
        return
    document["attention"] = rule
    lengths = ints([r["prefix"] + r["extend"] for r in document["requests"]])
    for part in document["ranks"]:
        if "segments" not in part:
            continue
        if causal:
            part["segments"]["window"] = [rule["window"]] * len(part["segments"]["keys"])
        else:
            columns = {name: ints(values) for name, values in part["segments"].items()}
            part["segments"] = _not_causal(columns, lengths, rule)


def _not_causal(calls: dict[str, Ints], lengths: Ints, rule: dict[str, int]) -> dict[str, Any]:
    """Return calls with rows placed as in causal ones that also see keys behind their own."""
    left, right = rule.get("window"), rule.get("window_right")
    length, step = lengths[calls["request"]], calls.get("step", np.ones_like(calls["rows"]))
    begin = calls["keys"] - 1 - (calls["rows"] - 1) * step  # the position of the first row
    inner = np.zeros_like(begin)  # rows whose window ends before the last key
    if right is not None:
        inner = np.clip((length - 1 - right - begin) // step + 1, 0, calls["rows"])
    # A non-causal call moves its window by one key from row to row.
    outer = calls["rows"] - inner
    apart = np.where((step > 1) & (left is not None), outer, np.minimum(outer, 1))
    call, place = each(apart)
    size = outer[call] // apart[call]
    last = begin[call] + (inner[call] + place + size - 1) * step[call]
    ends = np.flatnonzero(inner)
    columns = {
        "request": (calls["request"][ends], calls["request"][call]),
        "row": (calls["row"][ends], calls["row"][call] + inner[call] + place),
        "rows": (inner[ends], size),
        "keys": ((begin + (inner - 1) * step + 1 + (right or 0))[ends], length[call]),
        "step": (step[ends], np.zeros_like(size)),
    }
    if left is not None:
        window = np.full(len(ends), left + (right or 0))
        columns["window"] = (window, left + length[call] - 1 - last)
    return {name: np.concatenate(values).tolist() for name, values in columns.items()}
