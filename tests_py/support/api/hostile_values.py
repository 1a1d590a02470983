# SPDX-License-Identifier: Apache-2.0
"""Arguments that callers may pass by mistake or malice, drawn for a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import cpattn
from support.api import argument_kinds, argument_sweep
from support.api.hostile_objects import (
    DTYPES,
    EDGES,
    REALS,
    TEXTS,
    Arrayish,
    Changing,
    Draw,
    Index,
    Liar,
    array,
)


def uninitialised(draw: Draw) -> Any:
    """An object of a bound class that nothing has constructed, where one can be had."""
    kind = draw.choice([cpattn.transfer.TransferPlan, cpattn.transfer.KVLayout])
    return kind.__new__(kind)


def anything(draw: Draw) -> Any:
    """Return something that hardly any argument takes."""
    return draw.choice(
        [
            lambda: None, object, argument_kinds.Opaque, argument_kinds.Nameless, dict, set, list,
            tuple, lambda: b"bytes", lambda: bytearray(8), lambda: memoryview(bytes(8)),
            lambda: 1 + 2j, lambda: range(3), lambda: (x for x in [1]), lambda: slice(None),
            lambda: Ellipsis, lambda: NotImplemented, object,Changing,
            lambda: draw.choice(EDGES), lambda: draw.choice(REALS), lambda: draw.choice(TEXTS),
            lambda: draw.choice([True, False, np.True_, np.False_]),
            lambda: argument_sweep.PLAN, lambda: argument_kinds.METADATA,
            lambda: uninitialised(draw), lambda: array(draw, np.ones((2, 3), np.float32)),
            lambda: Arrayish(np.ones(3, np.float32)), Liar,
        ]
    )()  # fmt: skip


def number(draw: Draw, good: Any = 1) -> Any:
    value = draw.choice(EDGES)
    if draw.random() < 0.3 and isinstance(good, int):
        value = draw.choice([good - 1, good + 1, 2 * good, good + 2**32, -good, good + 2**64])
    forms = [
        lambda: Index(value),
        lambda: Index(draw.choice(["1", None, 1.5, True])),
        lambda: draw.choice([np.uint64, np.int64])(value % 2**63),
        lambda: draw.choice([np.int8, np.uint8, np.int32])(value % 128),
        lambda: draw.choice([True, np.True_, float(value % 2**53), str(value), [value], (value,)]),
        lambda: draw.choice([np.array(value % 2**63), torch.tensor(value % 2**63), Changing()]),
    ]
    return draw.choice(forms)() if draw.random() < 0.5 else value


def real(draw: Draw, good: Any = 1.0) -> Any:
    odd = [np.array(0.5), torch.tensor(0.5), np.ones(1), "0.5", Changing(), True]
    odd += [np.float64(0.5), np.float32(1e30), np.float32(-1), np.float16(2)]
    return draw.choice([*odd, *EDGES]) if draw.random() < 0.3 else draw.choice(REALS)


def flag(draw: Draw, good: Any = True) -> Any:
    return draw.choice([True, False, np.True_, np.False_, not good, 0, 1, 2, "", "True", None, []])


def text(draw: Draw, good: Any = "") -> Any:
    return draw.choice([*TEXTS, None, 1, b"NHD", bytearray(b"NHD"), ["NHD"], np.str_("NHD")])


def items(draw: Draw, good: list[Any], item: Callable[[Draw, Any], Any]) -> list[Any]:
    """Draw a list with something changed."""
    values = list(good)
    place = draw.randrange(len(values)) if values else 0
    changed = [item(draw, values[0]) if i == place else v for i, v in enumerate(values)]
    forms = [
        *[lambda: changed] * 4,
        lambda: values[:-1],
        lambda: [*values, values[-1] if values else 0],
        lambda: values[::-1],
        list,
        lambda: values * draw.choice([2, 50]),
        lambda: [item(draw, 1) for _ in values],
    ]
    return draw.choice(forms)()


def listed(draw: Draw, good: Any) -> list[Any]:
    return good.tolist() if hasattr(good, "tolist") else list(good)


def numbers(draw: Draw, good: Any) -> Any:
    """A list of numbers, or what holds some."""
    values = items(draw, listed(draw, good), number)
    if draw.random() < 0.5:
        return values
    plain = [int(v) if isinstance(v, int) and abs(v) < 2**63 else 1 for v in values]
    form = draw.randrange(14)
    if form == 0:
        return tuple(values)
    if form == 1:
        return Liar(values)
    if form == 2:  # a list that its own elements change
        values = list(values)
        position = draw.randrange(len(values) + 1)
        change = draw.choice([values.clear, lambda: values.extend([1] * 1000), values.pop])
        values.insert(position, Index(1, change))
        return values
    if form == 3:
        return draw.choice(
            [range(len(values)), iter(plain), set(plain), str(plain), dict.fromkeys(plain)]
        )
    if form == 4:
        return draw.choice([1, 2**31, None, "12", b"12"])
    dtype = draw.choice([np.int64] * 4 + [np.int32] * 4 + DTYPES)
    try:
        made = np.array(plain, np.int64).astype(dtype)
    except (TypeError, ValueError, OverflowError):
        made = np.array(plain, np.int64)
    return array(draw, made) if draw.random() < 0.5 else made


def table(draw: Draw, good: Any) -> Any:
    rows = [listed(draw, row) for row in listed(draw, good)]
    form = draw.randrange(8)
    if form <= 2:
        return items(draw, rows, lambda draw, row: numbers(draw, rows[0]))
    if form == 3:
        return numbers(draw, rows[0] if rows else [])
    if form == 4:  # rows that another row changes
        rows.insert(0, [Index(1, draw.choice([rows.clear, lambda: rows[-1].clear()]))])
        return rows
    made = np.array(rows, draw.choice([np.int32, np.int64]))
    if form == 5 and made.size:
        made.flat[draw.randrange(made.size)] = draw.choice([-1, 2**31 - 1, -(2**31), 4, 100])
    return array(draw, made)


def frame(draw: Draw, good: bytes) -> Any:
    data = bytearray(good)
    if data and draw.random() < 0.7:
        data[draw.randrange(len(data))] = draw.randrange(256)
    form = draw.randrange(6)
    if form == 0:
        return bytes(data[: draw.randrange(len(data) + 1)])
    if form == 1:
        return bytes(data) * 2
    if form == 2:
        return draw.choice([b"", b"\xff" * 8, "text", None, 5, memoryview(bytes(data))])
    return bytes(data)


def bag(draw: Draw, good: Any) -> Any:
    """An object or a dict with a field of another value."""
    fields = dict(good) if isinstance(good, dict) else dict(vars(good))
    name = draw.choice(sorted(fields))
    value = fields[name]
    if draw.random() < 0.15:
        del fields[name]
    elif draw.random() < 0.25:
        fields[name] = anything(draw)
    elif isinstance(value, list):
        nested = value and isinstance(value[0], list)
        fields[name] = (
            items(draw, value, lambda draw, row: numbers(draw, value[0]))
            if nested
            else numbers(draw, value)
        )
    else:
        fields[name] = number(draw, value)
    return fields if isinstance(good, dict) else type(good)(**fields)


def nested(draw: Draw, good: Any) -> Any:
    """Something else inside of a value, where it holds anything."""
    if isinstance(good, (list, tuple)) and good and draw.random() < 0.7:
        position = draw.randrange(len(good))
        inner = nested(draw, good[position])
        values = [*good[:position], inner, *good[position + 1 :]]
        try:
            return type(good)(values) if type(good) in (list, tuple) else type(good)(*values)
        except TypeError:
            return values
    if isinstance(good, bool):
        return flag(draw, good)
    if isinstance(good, int):
        return number(draw, good)
    if isinstance(good, (list, tuple)):
        return numbers(draw, [1, 2])
    return anything(draw)


KINDS: dict[str, Callable[[Draw, Any], Any]] = {
    # Of what is done so often: all that are taken are small.
    "times": lambda draw, good: draw.choice([-1, 0, 1, 2, -(2**63), None, "1", 1.5, True]),
    "int": number, "float": real, "flag": flag, "text": text, "ints": numbers, "list": numbers,
    "lens": numbers, "floats": lambda draw, good: items(draw, listed(draw, good), real),
    "addresses": numbers, "table": table, "tensor": array, "output": array, "buffer": array,
    "any tensor": array, "frame": frame, "bag": bag, "value": nested,
    "frames": lambda draw, good: items(draw, good, lambda draw, item: frame(draw, good[0])),
    "dtype": lambda draw, good: draw.choice([*TEXTS, *DTYPES, torch.float32, torch.int8, None, 3]),
}  # fmt: skip


def hostile(draw: Draw, kind: str, good: Any) -> Any:
    """Something else for an argument."""
    kind = kind.removeprefix("?")
    if draw.random() < 0.15 or kind not in KINDS or good is None:
        return anything(draw)
    return KINDS[kind](draw, good)
