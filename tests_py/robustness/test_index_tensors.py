# SPDX-License-Identifier: Apache-2.0
"""Tables and lists of indices in every layout, and indices that fit no 32 bits.

A list of the calls is in `index_calls`; a parameter of a function that is named as one of indices
is in it.
"""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import cpattn
from support.api.index_calls import (
    ARGUMENTS,
    CALLS,
    PAGES,
    Call,
    by_two,
    gaps,
    ints,
    names_of,
    same_or_refused,
    send_kvcache,
    transposed,
)
from support.public_names import PUBLIC


def rows_apart(x: np.ndarray) -> np.ndarray:
    view = gaps((2 * len(x), *(n + 3 for n in x.shape[1:])), x.dtype)[1::2]
    view = view[:, 2:-1] if x.ndim == 2 else view
    view[...] = x
    return view


def backwards(x: np.ndarray) -> np.ndarray:
    """Negative strides in every dimension."""
    every = (slice(None, None, -1),) * x.ndim
    view = gaps(tuple(n + 2 for n in x.shape), x.dtype)[(slice(1, -1),) * x.ndim][every]
    view[...] = x
    return view


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("layout", [by_two, rows_apart, transposed])
@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_a_view_is_as_good_as_a_copy(call: Call, name: str, layout, dtype) -> None:
    array = call.arrays[name].astype(dtype)
    expected = call.outcome(**{name: array})
    assert not isinstance(expected, str), expected
    view = layout(array)
    assert np.array_equal(view, array)
    assert not view.flags.c_contiguous or view.ndim == 1
    same_or_refused(call, name, view, expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_a_broadcast_view_is_as_good_as_a_copy(call: Call, name: str, axis, dtype) -> None:
    """With a stride of 0; what numbers that are all equal mean is refused by some calls."""
    array = call.arrays[name].astype(dtype)
    view = np.broadcast_to(array[:1] if axis == 0 else array[..., :1], array.shape)
    assert 0 in view.strides
    same_or_refused(call, name, view, call.outcome(**{name: view.copy()}))


@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_negative_strides_are_refused(call: Call, name: str) -> None:
    view = backwards(call.arrays[name])
    assert np.array_equal(view, call.arrays[name])
    # What is a table of pages to the caller are the source's indices to the message.
    said = {"src_pages": "(src|source)", "dst_pages": "(dst|destination)"}.get(name, name)
    refusal = (
        rf"ValueError: .*{said}.* has a negative stride \(-\d+ bytes in dimension 0\), which is"
    )
    assert re.match(refusal, str(call.outcome(**{name: view})))


@pytest.mark.parametrize(("call", "name"), ARGUMENTS, ids=names_of)
def test_no_index_is_cut_to_32_bits(call: Call, name: str) -> None:
    """What is far out of range is refused, or as good as the last number of 32 bits."""
    array, right = call.arrays[name], call.outcome()
    assert not isinstance(right, str), right
    if name in call.as_addresses:
        return  # tested below
    refused = 0
    for where in np.ndindex(array.shape):
        if array[where] < 0:
            continue  # no index
        for distance in (1 << 32, -(1 << 32), 1 << 62):
            changed, clipped = array.copy(), array.copy()
            changed[where] += distance
            clipped[where] = np.clip(changed[where], -(1 << 31), (1 << 31) - 1)
            outcome = call.outcome(**{name: changed})
            if isinstance(outcome, str):
                assert outcome.startswith("ValueError: "), outcome
                refused += 1
            else:
                assert outcome == call.outcome(**{name: clipped}), (where, changed[where])
    assert refused or name in {"indices", "sparse_indices"}  # where it is no key, by contract


def test_indices_of_memory_have_64_bits() -> None:
    far = ints(1, 2, 7) + (1 << 32)
    groups = cpattn.transfer.group_concurrent_contiguous(far, ints(4, 5, 6) + (1 << 40))
    assert groups == ([[far[0], far[1]], [far[2]]], [[4 + 2**40, 5 + 2**40], [6 + 2**40]])
    near, far = (
        send_kvcache(**PAGES | {"dst_pages": PAGES["dst_pages"] + n}) for n in (0, 1 << 32)
    )
    distance = far.dst_addrs.astype(np.int64) - near.dst_addrs.astype(np.int64)
    assert distance.tolist() == [512 << 32] * len(near)


# What the functions call their arguments of indices, in their annotations or here.
LISTS = {"indices", "slots", "loc", "topk_indices", "sparse_indices", "page_table"}
# Other forms of what a call of the list has, and methods of classes that have one.
ELSEWHERE = {
    "pad_topk_indices",  # appends rows to it as it is
    "dcp_local_indices",
    "can_dsa_prefill_cp_interleave",
    "plan_kv_links",
    "plan_send_kvcache_slice",
    "plan_send_state",
}


def test_every_function_with_indices_is_in_the_list() -> None:
    covered = {call.name.partition(",")[0] for call in CALLS}
    for name, value in PUBLIC.items():
        if not inspect.isfunction(value):
            continue
        parameters = inspect.signature(value).parameters
        indices = [
            p.name for p in parameters.values() if p.name in LISTS or "Indices" in str(p.annotation)
        ]
        assert not indices or name in covered | ELSEWHERE, (name, indices)
