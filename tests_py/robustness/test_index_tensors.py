# SPDX-License-Identifier: Apache-2.0
"""Each argument of the whole interface that holds integers takes them in every layout. Indices that
do not fit into 32 bits are refused, or read in full."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cpattn
from support.api.api_calls import targets
from support.api.argument_kinds import Call, Target, torch

BUFFERS = ("k_buffer", "v_buffer", "index_k_buffer")  # pools have these
JUNK = 0x7FFF_FFF7  # it fills gaps, so that a layout read wrongly is seen


def plain(result: Any) -> Any:
    """Return arrays as shapes and bytes; other results compare by themselves."""
    if isinstance(result, (tuple, list)):
        return [plain(part) for part in result]
    if isinstance(result, np.ndarray):
        return result.shape, result.tobytes()
    if hasattr(result, "to_dict"):
        return plain(list(result.to_dict().values()))
    if isinstance(result, cpattn.transfer.TransferPlan):
        return plain([result.src_addrs, result.dst_addrs, result.lengths])
    if isinstance(result, cpattn.AttentionPlan):
        return plain([result.page_indptr, result.page_ids, result.items])
    return plain(result.numpy()) if hasattr(result, "numpy") else result


@dataclass(frozen=True)
class Argument:
    """An argument that holds indices; its call is made anew each time."""

    target: Target
    name: str
    array: np.ndarray

    def __str__(self) -> str:
        return f"{self.target.name}-{self.name}"

    def outcome(self, value: Any) -> Any:
        """Return the result and the written buffers, or the error; either compares by ==."""
        call: Call = self.target.make()
        values = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in call.values().items()}
        pool = getattr(call.function, "__self__", None)
        written = [getattr(pool, name, None) for name in BUFFERS]
        written += [values[name] for name, (kind, _) in call.arguments.items() if "output" in kind]
        before = plain(written)
        try:
            return plain([call.function(**values | {self.name: value}), *written])
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            assert plain(written) == before
            return f"{type(error).__name__}: {error}"
        finally:
            call.close()


def arguments() -> list[Argument]:
    found = []
    for target in targets():
        try:
            call = target.make()
        except ImportError:  # torch is missing
            continue
        for name, (kind, value) in call.arguments.items():
            if kind.removeprefix("?") not in ("ints", "table", "tensor") or value is None:
                continue
            array = np.asarray(value)
            selects = target.name == "KVSendIndices.select"  # it returns a view of its argument
            if array.size and array.dtype in (np.int32, np.int64) and not selects:
                found.append(Argument(target, name, array.astype(np.int64)))
        call.close()
    return found


ARGUMENTS = pytest.mark.parametrize("argument", arguments(), ids=str)


def gaps(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, JUNK, dtype)


def filled(view: np.ndarray, x: np.ndarray) -> np.ndarray:
    view[...] = x
    return view


def by_two(x: np.ndarray) -> np.ndarray:
    """Copy `x` with a stride of two elements in the last dimension."""
    return filled(gaps((*x.shape[:-1], 2 * x.shape[-1] + 1), x.dtype)[..., 1::2], x)


def inner(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return gaps(tuple(n + 2 for n in shape), dtype)[(slice(1, -1),) * len(shape)]


def transposed(x: np.ndarray) -> np.ndarray:
    return filled(inner(x.T.shape, x.dtype).T, x)


def rows_apart(x: np.ndarray) -> np.ndarray:
    view = gaps((2 * len(x), *(n + 3 for n in x.shape[1:])), x.dtype)[1::2]
    return filled(view[(slice(None), *(slice(2, -1),) * (x.ndim - 1))], x)


def same_or_refused(argument: Argument, view: Any, expected: object) -> None:
    """Check an outcome; arrays whose rows are not contiguous may be refused."""
    outcome = argument.outcome(view)
    array = np.asarray(view)
    if "must be contiguous" in str(outcome):
        assert array.strides[-1] != array.itemsize
        assert f"{argument.name} must be contiguous in its last dimension, got" in outcome
    else:
        assert outcome == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@ARGUMENTS
def test_a_view_is_as_good_as_a_copy(argument: Argument, dtype: type) -> None:
    array = argument.array.astype(dtype)
    expected = argument.outcome(array)
    if isinstance(expected, str) and dtype is np.int64:
        assert re.search("must be int32, got int64", expected), expected
        return
    assert not isinstance(expected, str), expected
    views = [by_two(array), rows_apart(array), transposed(array)]
    tensors = map(torch.from_numpy, (array, *views)) if torch is not None else ()
    for view in (*views, *tensors):
        same_or_refused(argument, view, expected)


@pytest.mark.parametrize("axis", [0, -1])
@ARGUMENTS
def test_a_broadcast_view_is_as_good_as_a_copy(argument: Argument, axis: int) -> None:
    """The view has a stride of 0; some calls refuse numbers that are all equal."""
    array = argument.array
    view = np.broadcast_to(array.take([0], axis), array.shape)
    expected = argument.outcome(view.copy())
    same_or_refused(argument, view, expected)
    if torch is not None:
        tensor = torch.from_numpy(array.take([0], axis)).expand(array.shape)
        same_or_refused(argument, tensor, expected)


@ARGUMENTS
def test_negative_strides_are_refused(argument: Argument) -> None:
    every = (slice(None, None, -1),) * argument.array.ndim
    outcome = argument.outcome(filled(inner(argument.array.shape, np.int64)[every], argument.array))
    if not isinstance(outcome, str):
        assert argument.target.name.startswith("ContextParallel.")  # it reads them in Python
        assert outcome == argument.outcome(argument.array)
        return
    # Some messages name an argument otherwise than the caller does.
    said = {"src_pages": "(src|source)", "dst_pages": "(dst|destination)", "loc": "(loc|slots)"}
    name = said.get(argument.name, argument.name)
    refusal = rf"ValueError: .*{name}.* has a negative stride \(-\d+ bytes in dimension 0\), which"
    assert re.match(refusal, str(outcome))


@ARGUMENTS
def test_no_index_is_cut_to_32_bits(argument: Argument) -> None:
    """Numbers far out of range are refused, used as they are, or clipped to 32 bits."""
    if argument.target.name.startswith(("PageInterleave.", "TokenInterleave.", "dcp_local")):
        return  # steps of 2^32 change no owner
    right, noticed = argument.outcome(argument.array), 0
    for where in np.ndindex(argument.array.shape):
        if argument.array[where] < 0:
            continue  # it is no index
        for distance in (1 << 32, -(1 << 32), 1 << 62):
            changed = argument.array.copy()
            changed[where] += distance  # cutting it to 32 bits would undo this
            outcome = argument.outcome(changed)
            if isinstance(outcome, str):
                assert outcome.startswith(("ValueError: ", "RuntimeError: ")), outcome
            if outcome != right:
                noticed += 1
                continue
            changed[where] = np.clip(changed[where], -(1 << 31), (1 << 31) - 1)
            assert outcome == argument.outcome(changed), (where, changed[where])
    assert noticed or argument.target.name == "topk_transform"  # it needs only one of two tables
