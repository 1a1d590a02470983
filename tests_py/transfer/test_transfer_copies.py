# SPDX-License-Identifier: Apache-2.0
"""Copies and pickles, which are whole, or say that they cannot be made."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from cpattn.transfer import (
    KVEntry,
    KVLayout,
    LocalEngine,
    TransferPlan,
    TransferStatus,
    plan_kv_links,
    plan_kv_transfer,
)
from cpattn.transfer.sglang_0_5_23 import KVArgs, KVChunk, KVSendCursor
from cpattn.transfer.wire import KVTransferRequest

ENTRIES = [
    KVEntry(layer, kind, draft, (1 << 48) + (layer << 20) + (draft << 30) + (i << 24), 4608, 512)
    for i, kind in enumerate(("k", "v"))
    for draft in (False, True)
    for layer in range(1 if draft else 3)
]
LAYOUT = KVLayout(
    ENTRIES, 8, tp_rank=1, tp_size=4, total_kv_heads=2, layers=(0, 3), dcp_interleave=2
)
WHOLE = KVLayout(ENTRIES, 8)
PLAN = plan_kv_transfer(WHOLE, WHOLE, [1, 2, 7], [4, 5, 6])
LINKS = plan_kv_links([WHOLE], [WHOLE], [[1, 2]], [[4, 5]])
VALUES = [
    PLAN,
    TransferPlan([1, 2**64 - 1], [3, 4], [5, 6]),
    LINKS,
    LAYOUT,
    ENTRIES[0],
    KVArgs(page_size=64, kv_data_ptrs=[8, 16], state_types=["mamba"], dcp_rank=3),
    KVSendCursor(42, 16, 16),
    KVChunk(0, 16, 0, 1, False, 16),
    KVTransferRequest(
        room=5, host="h", port=1, session_id="s", aux_index=0, required_count=1, page_indices=[2, 3]
    ),
]
WAYS = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda value, protocol=protocol: pickle.loads(pickle.dumps(value, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_travel_whole(value):
    for travel in WAYS:
        other = travel(value)
        assert type(other) is type(value)
        assert other == value
        assert (repr(other), str(other)) == (repr(value), str(value))
        if isinstance(value, TransferPlan):
            assert (other.parts, other.summary()) == (value.parts, value.summary())
        elif isinstance(value, KVArgs):
            assert vars(other) == vars(value)
        elif isinstance(value, KVLayout):
            assert other.to_dict() == value.to_dict()


def test_a_status_keeps_how_far_it_came():
    status = TransferStatus(-7, num_batches=3, first_failed_batch=1, attempts=2)
    for travel in WAYS:
        other = travel(status)
        assert type(other) is TransferStatus
        assert (int(other), vars(other)) == (-7, vars(status))


def test_parts_of_a_plan_made_by_hand():
    class Tuple(tuple):
        def __iter__(self):
            raise RuntimeError

    parts = Tuple([Tuple(("k", 1, 2))])
    assert TransferPlan([1, 2], [3, 4], [5, 6], parts).parts == [("k", 1, 2)]
    assert [name for name, *_ in PLAN.parts] == ["k", "draft k", "v", "draft v"]
    plan = TransferPlan([1, 2], [3, 4], [5, 6], parts=[["k", 1, 1], ("index", 1, 1)])
    assert plan.parts == [("k", 1, 1), ("index", 1, 1)]
    assert plan == TransferPlan([1, 2], [3, 4], [5, 6])  # the blocks are what counts


def test_an_engine_stays_in_its_process():
    with LocalEngine() as engine:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="LocalEngine: an engine cannot be pickled or cop"):
                way(engine)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([("k", 1, 3)], ValueError, "parts must have the 2 blocks of the plan, got more"),
        ([("k", 1, 1)], ValueError, "parts must have the 2 blocks of the plan, got 1"),
        ([("k", 1, 2**64 - 1), ("v", 1, 3)], ValueError, "parts must have the 2 blocks of the p"),
        ([("k", 2)], ValueError, "parts must have 3 fields each, got 2"),
        ([(1, 1, 2)], TypeError, "parts: name must be a str, got int"),
        ([("k", -1, 2)], ValueError, "parts: number of entries must be in [0, 2^64), got -1"),
        ([("k", 1, 2.0)], TypeError, "parts: number of blocks must be an integer, got float"),
        ([("\ud800", 1, 2)], TypeError, "parts: name must be a str that UTF-8 can hold"),
        (["kkk"], TypeError, "parts must be a list of (name, number of entries, number of blocks)"),
        ("k", TypeError, "parts must be a list of (name, number of entries, number of blocks)"),
    ],
)
def test_parts_that_do_not_fit(parts, error, message):
    with pytest.raises(error, match=f"^TransferPlan: {re.escape(message)}"):
        TransferPlan([1, 2], [3, 4], [5, 6], parts)
