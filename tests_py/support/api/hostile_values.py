# SPDX-License-Identifier: Apache-2.0
"""Arguments that callers may pass by mistake or malice, drawn for a kind."""

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import cpattn
from support.api import argument_sweep
from support.api.argument_kinds import METADATA, NOTHING, WRONG

Draw = random.Random

# Numbers at which arithmetic of 32 or 64 bits overflows, and their neighbours.
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
    """Number that calls a function when it is read."""

    def __init__(self, value: Any, then: Callable[[], object] = lambda: None) -> None:
        self.value, self.then = value, then

    def __index__(self) -> Any:
        self.then()
        return self.value


class Changing:
    def __init__(self) -> None:
        self.value = 0

    def __index__(self) -> int:
        self.value += 1
        return self.value

    def __float__(self) -> float:
        return float(self.__index__())


class Liar(list[Any]):
    """List that lies about its length and its elements."""

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: Any) -> Any:
        return 2**40

    def __iter__(self) -> Any:
        return iter(range(3))


class Arrayish:
    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, (2**40,), np.dtype(np.float32)

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.array


class Exporter:
    """Object with __dlpack__, which may not work."""

    def __init__(self, array: Any, result: Any) -> None:
        self.array, self.result = array, result

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.array.__dlpack__() if self.result == "true" else self.result


def array(draw: Draw, good: Any) -> Any:
    good = np.asarray(good)
    forms = [
        lambda: converted(good, lambda x: x.astype(draw.choice(DTYPES))),
        lambda: np.asfortranarray(good),  # transposed in memory, with the same shape
        lambda: misaligned(good),
        lambda: good[None] if draw.random() < 0.5 else good.reshape(-1),
        lambda: np.ma.array(good, mask=draw.random() < 0.5),
        lambda: Exporter(
            good, draw.choice(["true", None, 1, RuntimeError("no"), BufferError("no")])
        ),
        lambda: converted(good, draw.choice([list, tuple, memoryview, bytes, Arrayish])),
        lambda: torch_tensor(draw, good),
        lambda: np.zeros(good.shape, good.dtype)[..., None],
        lambda: np.zeros(draw.choice([(), (0,), (1,), (0, 0), (2,) * 7, (0, 2**40)]), good.dtype),
        lambda: np.broadcast_to(good, good.shape),  # read-only
    ]
    if good.ndim:
        forms += [
            lambda: resized(draw, good, draw.choice([0, 1, 2, 3, 5, 17])),
            lambda: resized(draw, good, draw.choice([2**20, 2**31, 2**31 + 1, 2**40, 2**62])),
            lambda: np.moveaxis(good, draw.randrange(-1, good.ndim), 0),
            lambda: good[::-1],
            lambda: np.zeros((*good.shape[:-1], 2 * good.shape[-1]), good.dtype)[..., ::2],
            lambda: np.repeat(good, 2, axis=0)[::2],
            lambda: np.broadcast_to(good[:1], good.shape) if len(good) else good,
        ]
    if good.size and good.dtype.kind in "fV":
        forms += 2 * [lambda: with_one(draw, good, [np.nan, np.inf, -np.inf, 1e38, -1e4])]
    if good.size and good.dtype.kind in "iu":
        edge = np.iinfo(good.dtype)
        forms.append(lambda: with_one(draw, good, [edge.min, edge.max, 0]))
    return draw.choice(forms)() if draw.random() < 0.8 else good.copy()


def converted(good: Any, form: Callable[[Any], Any]) -> Any:
    try:
        return form(good)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # dates, or dtypes without buffer
        return good.copy()


def with_one(draw: Draw, good: Any, values: list[Any]) -> Any:
    copy = good.copy()
    copy.flat[draw.randrange(good.size)] = draw.choice(values)
    return copy


def resized(draw: Draw, good: Any, size: int) -> Any:
    """Return the array with an axis of this size, without memory if it is huge."""
    axis = draw.randrange(good.ndim)
    shape = [*good.shape[:axis], size, *good.shape[axis + 1 :]]
    if np.prod(shape, dtype=object) <= 1 << 16:
        return np.resize(good, shape) if good.size else np.zeros(shape, good.dtype)
    try:
        return np.broadcast_to(good[(slice(None),) * axis + (slice(1),)], shape)
    except ValueError:
        return good[..., None]


def misaligned(good: Any) -> Any:
    memory = np.zeros(good.nbytes + 1, np.uint8)
    odd = memory[1:].view(good.dtype) if good.dtype != object else good
    return odd.reshape(good.shape)


def torch_tensor(draw: Draw, good: Any) -> Any:
    integers = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8}.get(good.dtype.name)
    try:
        tensor = torch.from_numpy(good.copy() if integers is None else good.copy().view(integers))
    except (TypeError, ValueError):
        return good
    if integers is not None:
        tensor = tensor.view(getattr(torch, good.dtype.name))
    forms = [lambda: tensor, lambda: tensor.to("meta")]
    forms.append(lambda: torch.nn.Parameter(tensor, requires_grad=False))
    if tensor.is_floating_point():
        forms.append(tensor.requires_grad_)
    if tensor.ndim and len(tensor):
        forms.append(lambda: tensor.transpose(0, -1))
        repeats = draw.choice([len(tensor), 2**33])
        forms.append(lambda: tensor[:1].expand(repeats, *tensor.shape[1:]))
    if tensor.dtype is torch.float32:
        other = draw.choice([torch.bfloat16, torch.float16, torch.float64, torch.complex64])
        forms += [lambda: tensor.to(other), tensor.to_sparse]
        forms.append(lambda: torch.complex(tensor, tensor).conj().imag)
        forms.append(lambda: torch.nested.nested_tensor([tensor, tensor]))
    return draw.choice(forms)()


def anything(draw: Draw) -> Any:
    """Return something that hardly any argument takes."""
    kind = draw.choice([cpattn.transfer.TransferPlan, cpattn.transfer.KVLayout])
    odd = [None, (), bytearray(8), memoryview(bytes(8)), range(3), (x for x in [1]), slice(None)]
    odd += [Ellipsis, NotImplemented, True, np.False_, Changing(), Liar()]
    odd += [Arrayish(np.ones(3, np.float32)), array(draw, np.ones((2, 3), np.float32))]
    odd += [argument_sweep.PLAN, METADATA, kind.__new__(kind)]  # the last is not constructed
    return draw.choice([*odd, *NOTHING, *map(draw.choice, (EDGES, REALS, TEXTS))])


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
    odd = [np.array(0.5), torch.tensor(0.5), Changing(), *WRONG["float"]]
    return draw.choice([*odd, *EDGES]) if draw.random() < 0.3 else draw.choice(REALS)


def items(draw: Draw, good: list[Any], item: Callable[[Draw, Any], Any]) -> list[Any]:
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
    values = items(draw, listed(draw, good), number)
    if draw.random() < 0.5:
        return values
    plain = [int(v) if isinstance(v, int) and abs(v) < 2**63 else 1 for v in values]
    if draw.random() < 0.3:  # a list that its own elements change
        change = draw.choice([values.clear, lambda: values.extend([1] * 1000), values.pop])
        values.insert(draw.randrange(len(values) + 1), Index(1, change))
        return values
    if draw.random() < 0.5:
        held = [tuple(values), Liar(values), range(len(values)), iter(plain), set(plain)]
        held += [str(plain), dict.fromkeys(plain), 1, 2**31, None, "12", b"12"]
        return draw.choice(held)
    dtype = draw.choice([np.int64] * 4 + [np.int32] * 4 + DTYPES)
    made = converted(np.array(plain, np.int64), lambda x: x.astype(dtype))
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
    """Return an object or a dict that differs in one field."""
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
    if isinstance(good, (list, tuple)) and good and draw.random() < 0.7:
        position = draw.randrange(len(good))
        values = [*good[:position], nested(draw, good[position]), *good[position + 1 :]]
        try:
            return type(good)(values) if type(good) in (list, tuple) else type(good)(*values)
        except TypeError:
            return values
    if isinstance(good, int):
        return draw.choice([not good, number(draw, good)])
    if isinstance(good, (list, tuple)):
        return numbers(draw, [1, 2])
    return anything(draw)


KINDS: dict[str, Callable[[Draw, Any], Any]] = {
    # Numbers of repetitions: all valid ones are small.
    "times": lambda draw, good: draw.choice([-1, 0, 1, 2, -(2**63), None, "1", 1.5, True]),
    "int": number, "float": real,
    "flag": lambda draw, good: draw.choice([True, False, np.True_, np.False_, *WRONG["flag"]]),
    "text": lambda draw, good: draw.choice([*TEXTS, np.str_("NHD"), None, *WRONG["text"]]),
    "ints": numbers, "list": numbers,
    "lens": numbers, "floats": lambda draw, good: items(draw, listed(draw, good), real),
    "addresses": numbers, "table": table, "tensor": array, "output": array, "buffer": array,
    "any tensor": array, "frame": frame, "bag": bag, "value": nested,
    "frames": lambda draw, good: items(draw, good, lambda draw, item: frame(draw, good[0])),
    "dtype": lambda draw, good: draw.choice([*TEXTS, *DTYPES, torch.float32, torch.int8, None, 3]),
}  # fmt: skip


def hostile(draw: Draw, kind: str, good: Any) -> Any:
    kind = kind.removeprefix("?")
    if draw.random() < 0.15 or kind not in KINDS or good is None:
        return anything(draw)
    return KINDS[kind](draw, good)
