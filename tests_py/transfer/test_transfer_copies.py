# SPDX-License-Identifier: Apache-2.0
"""Plans and other values of transfers describe themselves; copies of them are whole or refused."""

import copy
import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
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
from cpattn.transfer.plan import human_bytes, rows_of
from cpattn.transfer.sglang_0_5_23 import KVArgs, KVChunk, KVSendCursor
from cpattn.transfer.wire import KVTransferRequest

ENTRIES = [
    KVEntry(layer, kind, draft, (layer << 20) + (draft << 30) + (i << 24), 4608 << i, 512 << i)
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

    assert TransferPlan([1, 2], [3, 4], [5, 6], Tuple([Tuple(("k", 1, 2))])).parts == [("k", 1, 2)]
    assert [name for name, *_ in PLAN.parts] == ["k", "draft k", "v", "draft v"]
    plan = TransferPlan([1, 2], [3, 4], [5, 6], parts=[["k", 1, 1], ("index", 1, 1)])
    assert plan.parts == [("k", 1, 1), ("index", 1, 1)]
    assert plan == TransferPlan([1, 2], [3, 4], [5, 6])  # only the blocks count


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


def test_a_value_of_three_read_only_arrays():
    plan = TransferPlan([1, 2**64 - 1], (3, 4), np.array([5, 6], np.uint64))
    assert len(plan) == 2
    assert plan.total_bytes == 11
    assert plan == TransferPlan([1, 2**64 - 1], [3, 4], [5, 6])
    assert TransferPlan(**json.loads(json.dumps(plan.to_dict()))) == plan
    for dtype in (np.int32, np.int64, np.uint32):
        small = TransferPlan(*np.array([[1, 2], [3, 4], [5, 6]], dtype))
        assert small == TransferPlan([1, 2], [3, 4], [5, 6])
    assert plan != TransferPlan([1, 2**64 - 1], [3, 4], [5, 7])
    assert plan != TransferPlan([1], [3], [5])
    assert repr(plan) == "TransferPlan(2 blocks, 11 bytes)"
    arrays = plan.src_addrs, plan.dst_addrs, plan.lengths
    del plan
    for array, values in zip(arrays, ([1, 2**64 - 1], [3, 4], [5, 6]), strict=True):
        assert array.tolist() == values
        assert array.dtype == np.uint64
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_an_empty_plan():
    plan = TransferPlan([], [], [])
    assert len(plan) == plan.total_bytes == 0
    assert plan.src_addrs.shape == (0,)
    assert plan.to_dict() == {"src_addrs": [], "dst_addrs": [], "lengths": []}
    assert plan.summary().splitlines()[1].split() == ["total", "0", "0", "B", "0", "B"]


def test_summary_tells_kinds_and_drafts_apart():
    assert PLAN.parts == [("k", 3, 6), ("draft k", 1, 2), ("v", 3, 6), ("draft v", 1, 2)]
    assert PLAN.summary() == (
        "part     layers  blocks     bytes  mean block\n"
        "k             3       6   4.5 KiB       768 B\n"
        "draft k       1       2   1.5 KiB       768 B\n"
        "v             3       6   9.0 KiB     1.5 KiB\n"
        "draft v       1       2   3.0 KiB     1.5 KiB\n"
        "total                16  18.0 KiB     1.1 KiB"
    )
    assert repr(PLAN) == (
        "TransferPlan(16 blocks, 18432 bytes, 3 × k, 1 × draft k, 3 × v, 1 × draft v)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [2], []), "must be equally long, got 1, 1 and 0"),
        (([-1], [2], [3]), "src_addrs must be in [0, 2^64), got -1 at index 0"),
        (([1], [2**64], [3]), f"dst_addrs must be in [0, 2^64), got {2**64} at index"),
        (([1], [2], [10**5000]), "must be in [0, 2^64), got a number of 16610 bits"),
        (([1], [2], np.array([-3])), "lengths must be in [0, 2^64), got -3 at index 0"),
        (([1, 1], [2, 2], [2**63, 2**63]), "lengths must add up to less than 2^64, got 92233720"),
        (([1], [2], np.zeros((1, 1), np.uint64)), "must have 1 dimension, got 2"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=f"^TransferPlan: .*{re.escape(message)}"):
        TransferPlan(*arguments)


def test_bytes_are_told_in_the_unit_that_leaves_less_than_1024():
    numbers = [0, 1023, 1024, 1536, 2**20, 2**30, 2**40 - 2**30, 2**40, 5 * 2**50]
    told = "0 B, 1023 B, 1.0 KiB, 1.5 KiB, 1.0 MiB, 1.0 GiB, 1023.0 GiB, 1.0 TiB, 5,120.0 TiB"
    assert ", ".join(map(human_bytes, numbers)) == told


def test_lines_of_parts_add_up_what_has_one_name():
    parts = [("k", 2, 3), ("", 1, 1), ("v", 1, 1), ("k", 4, 2)]
    plan = SimpleNamespace(parts=parts, lengths=np.array([1, 2, 4, 8, 16, 32, 64]))
    assert rows_of(plan) == [("k", "6", "5", "103 B", "21 B"), ("v", "1", "1", "16 B", "16 B")]
