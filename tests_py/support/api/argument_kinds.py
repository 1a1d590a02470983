# SPDX-License-Identifier: Apache-2.0
"""Calls with good arguments, the kinds of arguments, and wrong values for each kind."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cpattn

torch: Any = None
with contextlib.suppress(ImportError):  # other interpreters run only what needs no torch
    import torch

Arguments = dict[str, tuple[str, Any]]  # name -> (kind, value); kinds with ? take None, too
SHOWN = "shown by "  # prefix of kinds from `given`, until a call knows its function


class Opaque:
    __slots__ = ()  # all calls share one object, and some set attributes

    def __repr__(self) -> str:
        return "x" * 10_000  # no message may contain this


class Nameless:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")

    def _refuse(self) -> Any:
        raise RuntimeError("no number")

    __len__ = __index__ = __float__ = __bool__ = _refuse


NOTHING = [Opaque(), Nameless(), object, {}, {1, 2}, b"bytes", 1 + 2j]
ARRAYS = [np.ones(2, np.float32), np.ma.array([1.0, 2.0], mask=[True, False])]
META: list[Any] = []
if torch is not None:
    ARRAYS.append(torch.ones(2))
    META.append(torch.ones((2, 2), dtype=torch.int64, device="meta"))

# Wrong values by kind; None is wrong, too, if the argument is not optional.
WRONG: dict[str, list[Any]] = {
    "int": [*NOTHING, *ARRAYS, "16", 16.0, True, np.True_, np.float32(2), [16], 2**70],
    "float": [*NOTHING, *ARRAYS, "0.5", True, np.True_, [0.5], 10**400],
    "scale": [*NOTHING, *ARRAYS, "0.5", True, np.True_, [0.5], 10**400, 0.0, np.ones(1, np.uint16)],
    "flag": [*NOTHING, *ARRAYS, "yes", 1, 0, 1.0, []],
    "text": [*NOTHING, *ARRAYS, 1, 1.5, True, ["NHD"], "nonsense", "\ud800"],
    "value": [*NOTHING, *ARRAYS, "x", 1, True, []],
    "nothing": [*ARRAYS, "x", 1, True],
    "ints": [
        *[*NOTHING, *ARRAYS, "12", 1, 1.5, True, memoryview(b"12"), range(2)],
        *[[1.5, 2], [True, 2], ["1"], [None, 1], [[1], [2]], [2**70, 1]],
        *[np.ones((1, 1), np.int64), np.array([1, 2], np.uint16), np.array(["a"])],
        *[np.array([1, 2], ">i4"), np.array([1, 2])[::-1], np.ma.array([1, 2])],
        *META,
    ],
    "floats": [
        *[*NOTHING, ARRAYS[1], "12", 1, 1.5, True, ["1", 2.0], [None, 1.0], [[1.0], [2.0]]],
        *[[True, 2.0], [10**400, 1.0], np.ones((1, 2)), np.ones(2, np.int64), *META],
    ],
    "table": [
        *[*NOTHING, *ARRAYS, "12", 1, 1.5, True, [1, 2], [[1.5]], [[True]], [["1"]], [[None]]],
        *[[[2**70]], [1, [2]], np.ones(3, np.int64), np.ones((1, 1, 1), np.int64)],
        *[np.ones((2, 2), np.uint16), np.ones((2, 2), ">i4"), np.ma.ones((2, 2), np.int64)],
        *[np.ones((2, 2), np.int64)[::-1], *META],
    ],
    "addresses": [
        *[*NOTHING, *ARRAYS, "12", 1, 1.5, True, memoryview(b"12"), range(2), np.array([-1, 1])],
        *[[1.5, 2], [True, 2], ["1"], [None, 1], [[1], [2]], [-1, 1], [2**64, 1], [10**5000, 1]],
        *[np.ones((1, 1), np.uint64), np.ma.array([1, 2], mask=[False, True])],
    ],
    "list": [*NOTHING, *ARRAYS[1:2], 5, np.int64(5), True, memoryview(b"12")],
    "bag": [*NOTHING, 5, "x"],
}
# Lengths of sequences, in a list or in the form of a table.
WRONG["lens"] = [
    bad for bad in WRONG["ints"] if not (isinstance(bad, np.ndarray) and bad.ndim == 2)
]


# Arguments that may have any layout and any dtype of floats.
ANY_FLOATS = {"antiquant_scale", "antiquant_offset"}
LSES = {"lse", "lse_a", "lse_b", "lses"}
STRIDED = LSES | {"bias", "k_scale", "index_k_scale", "page_table", "topk_indices"}


def wrong_tensors(good: np.ndarray[Any, Any]) -> Iterator[Any]:
    yield from [*NOTHING, "x", 1, 1.5, True, [1.0], [[1.0]], memoryview(b"1234")]
    yield from [np.ma.array(good), np.array(["a"]), np.array([None]), good.astype(np.complex64)]
    yield np.zeros(good.shape, np.uint16)
    yield np.zeros(good.shape, np.float32).astype(">f4")
    yield np.zeros((2,) * 7, good.dtype)
    yield np.zeros((2, *good.shape[1:]), good.dtype)[::-1]
    if torch is None:
        return
    whole = torch.from_numpy(np.zeros(good.shape, np.float32))
    yield from [whole.to(torch.complex64), torch.empty(good.shape, device="meta")]
    yield from [whole.to_sparse(), whole.requires_grad_()]


def kind_of(value: Any) -> str:
    if isinstance(value, list):
        return "table" if value and isinstance(value[0], list) else "ints"
    kinds = {bool: "flag", int: "int", float: "float", str: "text", np.ndarray: "tensor"}
    return next((kind for known, kind in kinds.items() if isinstance(value, known)), "value")


def given(**values: Any) -> Arguments:
    """Return arguments with the kinds of their values; the signature says which may be None."""
    return {name: (SHOWN + kind_of(value), value) for name, value in values.items()}


def of_kind(kind: str, **values: Any) -> Arguments:
    return {name: (kind, value) for name, value in values.items()}


def known_kinds(function: Callable[..., Any], arguments: Arguments) -> Arguments:
    """Return the arguments; kinds from `given` get a ? if the function takes None for them."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # the function is a builtin
        parameters = {}

    def known(name: str, kind: str) -> str:
        parameter = parameters.get(name)
        optional = parameter is not None and (
            parameter.default is None or "None" in str(parameter.annotation)
        )
        return kind.replace(SHOWN, "?" if optional else "")

    return {name: (known(name, kind), value) for name, (kind, value) in arguments.items()}


@dataclass
class Call:
    """A call that succeeds."""

    function: Callable[..., Any]
    arguments: Arguments
    name: str = ""  # errors begin with it
    close: Callable[[], None] = lambda: None
    # Documented errors besides TypeError, ValueError and MemoryError.
    errors: tuple[type[Exception], ...] = ()
    # Words that messages may have instead of an argument's name.
    names: tuple[str, ...] = ()
    # Beginnings that messages may have instead of the function's name.
    prefixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.name = self.name or getattr(self.function, "__name__", "")
        self.arguments = known_kinds(self.function, self.arguments)

    def values(self) -> dict[str, Any]:
        return {name: value for name, (_, value) in self.arguments.items()}

    def wrong(self) -> Iterator[tuple[str, Any]]:
        """Yield every argument with each of its wrong values."""
        for name, (kind, value) in self.arguments.items():
            optional = kind.startswith("?")
            kind = kind.removeprefix("?")
            if kind == "any":
                continue
            if not optional:
                yield name, None
            yield from ((name, bad) for bad in WRONG.get(kind, ()) if bad is not None)
            if kind in ("tensor", "output") and value is not None:
                yield from ((name, bad) for bad in wrong_tensors(value))
                if not self.name.startswith("reference.") and name not in ANY_FLOATS:
                    yield (
                        name,
                        value.astype(np.float64 if value.dtype == np.float32 else np.float32),
                    )
                    yield name, value.reshape(-1)[0]
                    if value.shape[-1] > 1 and name not in STRIDED:
                        yield name, np.repeat(value, 2, -1)[..., ::2]
            if kind == "output":
                read_only = value.copy()
                read_only.flags.writeable = False
                yield name, read_only
                yield name, np.broadcast_to(np.zeros((), value.dtype), value.shape)


@dataclass
class Target:
    """Public callable; its errors begin with `name`."""

    name: str
    make: Callable[[], Call]
    judged: bool = True  # whether results for ordinary numbers are ordinary


def f32(*shape: int) -> np.ndarray[Any, Any]:
    """Return different numbers around 1, so that results show which of them were read."""
    return np.random.default_rng(shape).uniform(0.5, 1.5, shape).astype(np.float32)


def fresh(value: Any) -> Any:
    if isinstance(value, list):
        return [fresh(item) for item in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def in_torch(value: Any) -> Any:
    """Return a tensor with the memory of an array, if torch has its dtype; also in lists."""
    if isinstance(value, list):
        return [in_torch(item) for item in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(value)
    except TypeError:
        return value


def i32(*rows: Any) -> np.ndarray[Any, Any]:
    return np.array(rows, np.int32)


METADATA = cpattn.build_cp_metadata([4, 4], [7, 4], cp_rank=0, cp_size=2)
