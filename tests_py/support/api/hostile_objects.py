# SPDX-License-Identifier: Apache-2.0
"""Values at the edges of types, and objects that lie about what they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

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


def array(draw: Draw, good: Any) -> Any:
    """A tensor that something is odd about, if not wrong."""
    good = np.asarray(good)
    forms = [
        lambda: converted(good, draw.choice(DTYPES)),
        lambda: np.asfortranarray(good),  # transposed in memory, of the same shape
        lambda: misaligned(good),
        lambda: good[None] if draw.random() < 0.5 else good.reshape(-1),
        lambda: np.ma.array(good, mask=draw.random() < 0.5),
        lambda: Exporter(
            good, draw.choice(["true", None, 1, RuntimeError("no"), BufferError("no")])
        ),
        lambda: held(good, draw.choice([list, tuple, memoryview, bytes, Arrayish])),
        lambda: torch_tensor(draw, good),
        lambda: np.zeros(good.shape, good.dtype)[..., None],
        lambda: np.zeros(draw.choice([(), (0,), (1,), (0, 0), (2,) * 7, (0, 2**40)]), good.dtype),
        lambda: np.broadcast_to(good, good.shape),  # read-only
    ]
    if good.ndim:
        forms += [
            lambda: resized(draw, good, draw.choice([0, 1, 2, 3, 5, 17])),
            lambda: huge(draw, good, draw.choice([2**20, 2**31, 2**31 + 1, 2**40, 2**62])),
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


def converted(good: Any, dtype: Any) -> Any:
    try:
        return good.astype(dtype)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one of dates
        return good.copy()


def held(good: Any, form: Any) -> Any:
    try:
        return form(good)
    except ValueError:  # a dtype that buffers do not know
        return list(good)


def with_one(draw: Draw, good: Any, values: list[Any]) -> Any:
    """One of these numbers at one place."""
    copy = good.copy()
    copy.flat[draw.randrange(good.size)] = draw.choice(values)
    return copy


def huge(draw: Draw, good: Any, size: int) -> Any:
    """An axis of this size, without memory."""
    axis = draw.randrange(good.ndim)
    shape = [*good.shape[:axis], size, *good.shape[axis + 1 :]]
    try:
        return np.broadcast_to(good[(slice(None),) * axis + (slice(1),)], shape)
    except ValueError:
        return good[..., None]


def resized(draw: Draw, good: Any, size: int) -> Any:
    axis = draw.randrange(good.ndim)
    shape = [*good.shape[:axis], size, *good.shape[axis + 1 :]]
    if np.prod(shape, dtype=object) > 1 << 16:
        return good.copy()
    return np.resize(good, shape) if good.size else np.zeros(shape, good.dtype)


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
