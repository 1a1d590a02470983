# SPDX-License-Identifier: Apache-2.0
"""What may not stand for an argument of a kind, and a call with good ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import cpattn


class Opaque:
    """Nothing that any function takes."""

    def __repr__(self) -> str:
        return "x" * 10_000  # which no message may contain


class Nameless:
    """Raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no attributes")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __index__(self) -> int:
        raise RuntimeError("no number")

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")


NOTHING = [Opaque(), Nameless(), object, {}, {1, 2}, b"bytes", 1 + 2j]
ARRAYS = [np.ones(2, np.float32), torch.ones(2), np.ma.array([1.0, 2.0], mask=[True, False])]

# Kind: what is wrong, beside None where it is not optional.
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
        torch.ones(2, dtype=torch.int64, device="meta"),
    ],
    "table": [
        *[*NOTHING, *ARRAYS, "12", 1, 1.5, True, [1, 2], [[1.5]], [[True]], [["1"]], [[None]]],
        *[[[2**70]], [1, [2]], np.ones(3, np.int64), np.ones((1, 1, 1), np.int64)],
        *[np.ones((2, 2), np.uint16), np.ones((2, 2), ">i4"), np.ma.ones((2, 2), np.int64)],
        *[np.ones((2, 2), np.int64)[::-1], torch.ones((2, 2), dtype=torch.int32, device="meta")],
    ],
}


def wrong_tensors(good: np.ndarray[Any, Any]) -> Iterator[Any]:
    """What may not stand for a tensor that is good."""
    yield from [*NOTHING, "x", 1, 1.5, True, [1.0], [[1.0]], memoryview(b"1234")]
    yield np.ma.array(good)
    yield np.array(["a"])
    yield np.array([None])
    yield good.astype(np.complex64)
    yield np.zeros(good.shape, np.uint16)
    yield np.zeros(good.shape, np.float32).astype(">f4")
    yield np.zeros((2,) * 7, good.dtype)
    yield np.zeros((2, *good.shape[1:]), good.dtype)[::-1]
    whole = torch.from_numpy(np.zeros(good.shape, np.float32))
    yield whole.to(torch.complex64)
    yield torch.empty(good.shape, device="meta")
    yield whole.to_sparse()
    yield whole.requires_grad_()


@dataclass
class Call:
    """A function with good arguments, by name: (kind, value)."""

    function: Callable[..., Any]
    arguments: dict[str, tuple[str, Any]]
    name: str = ""  # as errors begin

    def __post_init__(self) -> None:
        self.name = self.name or self.function.__name__

    def values(self) -> dict[str, Any]:
        return {name: value for name, (_, value) in self.arguments.items()}

    def wrong(self) -> Iterator[tuple[str, Any]]:
        """Every argument in turn, with everything that is wrong for it."""
        for name, (kind, value) in self.arguments.items():
            optional = kind.startswith("?")
            kind = kind.removeprefix("?")
            if kind == "any":
                continue
            if not optional:
                yield name, None
            yield from ((name, bad) for bad in WRONG.get(kind, ()) if bad is not None)
            if kind in ("tensor", "output"):
                yield from ((name, bad) for bad in wrong_tensors(value))
            if kind == "output":
                read_only = value.copy()
                read_only.flags.writeable = False
                yield name, read_only
                yield name, np.broadcast_to(np.zeros((), value.dtype), value.shape)


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def i32(*rows: Any) -> np.ndarray[Any, Any]:
    return np.array(rows, np.int32)


METADATA = cpattn.build_cp_metadata([4, 4], [7, 4], cp_rank=0, cp_size=2)

LAYER = {
    "q": ("tensor", f32(3, 2, 16)),
    "k_cache": ("tensor", f32(4, 8, 1, 16)),
    "v_cache": ("tensor", f32(4, 8, 1, 16)),
}
OPTIONS = {
    "kv_layout": ("text", "NHD"),
    "k_scale": ("?scale", 0.5),
    "v_scale": ("?scale", f32(1)),
    "kv_dtype": ("?text", None),
    "scale": ("?float", 0.25),
    "softcap": ("float", 0.0),
    "sinks": ("?tensor", f32(2)),
    "out": ("?output", f32(3, 2, 16)),
    "lse": ("?output", f32(3, 2)),
    "return_lse": ("flag", True),
}
BATCH = {
    "q_lens": ("ints", [3]),
    "kv_lens": ("ints", [10]),
    "block_tables": ("table", [[2, 0]]),
    "causal": ("flag", True),
    "window": ("?int", 5),
    "custom_mask": ("?tensor", np.ones(30, bool)),
    "allow_short_kv": ("flag", False),
    "batch_invariant": ("flag", False),
    "num_threads": ("?int", 1),
}
SPARSE_MLA = {
    "q": ("tensor", f32(2, 4, 32)),
    "kv": ("tensor", f32(10, 1, 32)),
    "indices": ("tensor", i32([[7, 9, -1]], [[-1, 3, -1]])),
    "sm_scale": ("float", 0.125),
    "d_v": ("int", 16),
    "attn_sink": ("?tensor", f32(4)),
    "topk_length": ("?ints", [3, 2]),
}
