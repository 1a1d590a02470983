# SPDX-License-Identifier: Apache-2.0
"""What callers may pass by mistake or malice, drawn for an argument of a kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import argument_sweep
import cpattn

Draw = random.Random

# Numbers at which arithmetic of 32 or 64 bits turns over, and those beside them.
EDGES = [
    *range(-3, 5), 7, 8, 15, 16, 17, 31, 64, 128, 576, 577, 592, 1000, -1000, 2**16,
    *(sign * 2**power + step for power in (31, 32, 62, 63, 64) for step in (-1, 0, 1, 3)
      for sign in (1, -1)),
    2**60 + 1, 10**30, -(10**30),
]  # fmt: skip
REALS = [
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e-45, 1e-37, 1e37, 3.5e38, 1e300, -1e300,
    float("nan"), float("inf"), -float("inf"), np.float16(0.5), np.float32(1e30), 10**400,
]  # fmt: skip
TEXTS = [
    "", "NHD", "HND", "TND", "BSND", "BSH", "BNSD", "BNSD_BSND", "PA_BSND", "zigzag", "interleave",
    "contiguous", "in-seq-split", "round-robin-split", "baked", "bare", "int8", "float8_e4m3fn",
    "float32", "bfloat16", "float16", "ue8m0", "flashmla_sparse", "fa3", "pages", "layers", "I",
    "i", "Q", "numpy", "torch", "local:1", "\0", "\ud800", "ü", "NHD ", "nhd", "x" * 10_000, "%s{}",
]  # fmt: skip
DTYPES = [
    np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64, np.int8,
    np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.bool_,
    np.complex64, np.dtype(">f4"), np.dtype(">i4"), np.object_, np.dtype("S4"), np.dtype("M8[s]"),
    np.dtype([("a", np.float32)]),
]  # fmt: skip


class Index:
    """Stands for a number, and does something when it is asked."""

    def __init__(self, value: Any, then: Callable[[], object] = lambda: None) -> None:
        self.value, self.then = value, then

    def __index__(self) -> Any:
        self.then()
        return self.value


class Changing:
    """Another number each time it is asked."""

    def __init__(self) -> None:
        self.value = 0

    def __index__(self) -> int:
        self.value += 1
        return self.value

    def __float__(self) -> float:
        return float(self.__index__())


class Liar(list[Any]):
    """A list that lies about its length and what it holds."""

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: Any) -> Any:
        return 2**40

    def __iter__(self) -> Any:
        return iter(range(3))


class Arrayish:
    """Something that NumPy would take for an array."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, (2**40,), np.dtype(np.float32)

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.array


class Exporter:
    """Something with __dlpack__, which need not be true."""

    def __init__(self, array: Any, result: Any) -> None:
        self.array, self.result = array, result

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.array.__dlpack__() if self.result == "true" else self.result


def uninitialised(draw: Draw) -> Any:
    """An object of a bound class that nothing has constructed, where one can be had."""
    kind = draw.choice([cpattn.transfer.TransferPlan, cpattn.transfer.KVLayout])
    return kind.__new__(kind)


def anything(draw: Draw) -> Any:
    """What hardly any argument takes."""
    return draw.choice(
        [
            lambda: None, object, argument_sweep.Opaque, argument_sweep.Nameless, dict, set, list,
            tuple, lambda: b"bytes", lambda: bytearray(8), lambda: memoryview(bytes(8)),
            lambda: 1 + 2j, lambda: range(3), lambda: (x for x in [1]), lambda: slice(None),
            lambda: Ellipsis, lambda: NotImplemented, object,Changing,
            lambda: draw.choice(EDGES), lambda: draw.choice(REALS), lambda: draw.choice(TEXTS),
            lambda: draw.choice([True, False, np.True_, np.False_]),
            lambda: argument_sweep.PLAN, lambda: argument_sweep.METADATA,
            lambda: uninitialised(draw), lambda: array(draw, np.ones((2, 3), np.float32)),
            lambda: Arrayish(np.ones(3, np.float32)), Liar,
        ]
    )()  # fmt: skip


def number(draw: Draw, good: Any = 1) -> Any:
    value = draw.choice(EDGES)
    if draw.random() < 0.3 and isinstance(good, int):
        value = draw.choice([good - 1, good + 1, 2 * good, good + 2**32, -good, good + 2**64])
    form = draw.randrange(12)
    if form == 0:
        return Index(value)
    if form == 1:
        return Index(draw.choice(["1", None, 1.5, True]))
    if form == 2:
        return draw.choice([np.uint64, np.int64])(value % 2**63)
    if form == 3:
        return draw.choice([np.int8, np.uint8, np.int32])(value % 128)
    if form == 4:
        return draw.choice([True, np.True_, float(value % 2**53), str(value), [value], (value,)])
    if form == 5:
        return draw.choice([np.array(value % 2**63), torch.tensor(value % 2**63), Changing()])
    return value


def real(draw: Draw, good: Any = 1.0) -> Any:
    value = draw.choice(REALS)
    form = draw.randrange(10)
    if form == 0:
        return draw.choice([np.float64(0.5), np.float32(1e30), np.float32(-1), np.float16(2)])
    if form == 1:
        return draw.choice([np.array(0.5), torch.tensor(0.5), np.ones(1), "0.5", Changing(), True])
    if form == 2:
        return draw.choice(EDGES)
    return value


def flag(draw: Draw, good: Any = True) -> Any:
    return draw.choice([True, False, np.True_, np.False_, not good, 0, 1, 2, "", "True", None, []])


def text(draw: Draw, good: Any = "") -> Any:
    return draw.choice([*TEXTS, None, 1, b"NHD", bytearray(b"NHD"), ["NHD"], np.str_("NHD")])


def items(draw: Draw, good: list[Any], item: Callable[[Draw, Any], Any]) -> list[Any]:
    """A list with something changed."""
    values = list(good)
    form = draw.randrange(10)
    if form <= 3 and values:
        values[draw.randrange(len(values))] = item(draw, values[0])
    elif form == 4:
        values = values[:-1]
    elif form == 5:
        values = [*values, values[-1] if values else 0]
    elif form == 6:
        values = values[::-1]
    elif form == 7:
        values = []
    elif form == 8:
        values = values * draw.choice([2, 50])
    else:
        values = [item(draw, 1) for _ in values]
    return values


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


def array(draw: Draw, good: Any) -> Any:
    """A tensor that something is odd about, if not wrong."""
    good = np.asarray(good)
    form = draw.randrange(24)
    if form == 0:
        return converted(good, draw.choice(DTYPES))
    if form == 1 and good.ndim:  # another size of an axis
        return resized(draw, good, draw.choice([0, 1, 2, 3, 5, 17]))
    if form == 2 and good.ndim:  # a huge one, without memory
        axis = draw.randrange(good.ndim)
        shape = list(good.shape)
        shape[axis] = draw.choice([2**20, 2**31, 2**31 + 1, 2**40, 2**62])
        try:
            return np.broadcast_to(good[(slice(None),) * axis + (slice(1),)], shape)
        except ValueError:
            return good[..., None]
    if form == 3:
        return np.moveaxis(good, draw.randrange(-1, good.ndim), 0) if good.ndim else good
    if form == 4:  # transposed in memory, of the same shape
        return np.asfortranarray(good)
    if form == 5:
        return good[::-1] if good.ndim else good
    if form == 6:  # with gaps
        wide = np.zeros((*good.shape[:-1], 2 * good.shape[-1]), good.dtype) if good.ndim else good
        return wide[..., ::2] if good.ndim else good
    if form == 7 and good.ndim:
        return np.repeat(good, 2, axis=0)[::2]
    if form == 8:  # one row for all
        return np.broadcast_to(good[:1], good.shape) if good.ndim and len(good) else good
    if form == 9:
        return misaligned(good)
    if form == 10:
        copy = good.copy()
        copy.flags.writeable = False
        return copy
    if form == 11:
        return good[None] if draw.random() < 0.5 else good.reshape(-1)
    if form == 12:
        return np.ma.array(good, mask=draw.random() < 0.5)
    if form == 13:
        return Exporter(good, draw.choice(["true", None, 1, RuntimeError("no"), BufferError("no")]))
    if form == 14:
        form = draw.choice([list, tuple, memoryview, bytes, Arrayish])
        try:
            return form(good)
        except ValueError:  # a dtype that buffers do not know
            return list(good)
    if form in (15, 16) and good.dtype.kind in "fV" and good.size:
        copy = good.copy()
        copy.flat[draw.randrange(good.size)] = draw.choice([np.nan, np.inf, -np.inf, 1e38, -1e4])
        return copy
    if form == 17 and good.dtype.kind in "iu" and good.size:
        copy = good.copy()
        edge = np.iinfo(good.dtype)
        copy.flat[draw.randrange(good.size)] = draw.choice([edge.min, edge.max, 0])
        return copy
    if form == 18:
        return torch_tensor(draw, good)
    if form == 19:
        return np.zeros(good.shape, good.dtype)[..., None]
    if form == 20:
        return np.zeros(draw.choice([(), (0,), (1,), (0, 0), (2,) * 7, (0, 2**40)]), good.dtype)
    return good.copy()


def converted(good: Any, dtype: Any) -> Any:
    try:
        return good.astype(dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one of dates
        return good.copy()


def resized(draw: Draw, good: Any, size: int) -> Any:
    axis = draw.randrange(good.ndim)
    shape = list(good.shape)
    shape[axis] = size
    if np.prod(shape, dtype=object) > 1 << 16:
        return good.copy()
    return np.resize(good, shape) if good.size else np.zeros(shape, good.dtype)


def misaligned(good: Any) -> Any:
    memory = np.zeros(good.nbytes + 1, np.uint8)
    odd = memory[1:].view(good.dtype) if good.dtype != object else good
    return odd.reshape(good.shape)


def torch_tensor(draw: Draw, good: Any) -> Any:
    names = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8}
    name = good.dtype.name
    if name in names:
        tensor = torch.from_numpy(
            good.copy()
            .view(f"u{good.dtype.itemsize}")
            .view(np.int16 if name == "bfloat16" else np.uint8)
        )
        tensor = tensor.view(getattr(torch, name))
    else:
        try:
            tensor = torch.from_numpy(good.copy())
        except (TypeError, ValueError):
            return good
    form = draw.randrange(12)
    if form == 0 and tensor.is_floating_point():
        return tensor.requires_grad_()
    if form == 1:
        return tensor.to("meta")
    if form == 2 and tensor.ndim:
        return tensor.transpose(0, -1)
    if form == 3 and tensor.ndim and len(tensor):
        return tensor[:1].expand(draw.choice([len(tensor), 2**33]), *tensor.shape[1:])
    if form == 4 and tensor.dtype is torch.float32:
        return tensor.to(
            draw.choice([torch.bfloat16, torch.float16, torch.float64, torch.complex64])
        )
    if form == 5 and tensor.dtype is torch.float32:
        return tensor.to_sparse()
    if form == 6 and tensor.dtype is torch.float32:
        return torch.complex(tensor, tensor).conj().imag
    if form == 7 and tensor.dtype is torch.float32:
        return torch.nested.nested_tensor([tensor, tensor])
    if form == 8:
        return torch.nn.Parameter(tensor, requires_grad=False)
    return tensor


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
