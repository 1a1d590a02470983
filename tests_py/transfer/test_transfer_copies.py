# SPDX-License-Identifier: Apache-2.0
"""What travels by pickle or copy is whole, and what cannot says so."""

from __future__ import annotations

import copy
import pickle
import re
from functools import partial

import pytest

from cpattn.transfer import (
    KVArgs,
    KVChunk,
    KVEntry,
    KVLayout,
    KVLinks,
    KVSendCursor,
    LocalEngine,
    TransferPlan,
    TransferStatus,
    plan_kv_links,
    plan_kv_transfer,
)
from cpattn.transfer.wire import KVTransferRequest

ENTRIES = [
    KVEntry(
        layer, kind, draft, (1 << 48) + (layer << 20) + (draft << 30) + i * (1 << 24), 4608, 512
    )
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
ARGS = KVArgs(page_size=64, kv_data_ptrs=[8, 16], state_types=["mamba"], dcp_rank=3)

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle-{protocol}": lambda value, protocol=protocol: pickle.loads(
            pickle.dumps(value, protocol)
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def travel(request):
    return request.param


def test_a_plan_keeps_its_parts(travel):
    other = travel(PLAN)
    assert other == PLAN
    assert other.parts == PLAN.parts
    assert [name for name, *_ in other.parts] == ["k", "draft k", "v", "draft v"]
    assert other.summary() == PLAN.summary()
    assert repr(other) == repr(PLAN)


def test_a_plan_without_parts(travel):
    plan = TransferPlan([1, 2**64 - 1], [3, 4], [5, 6])
    assert travel(plan) == plan
    assert travel(plan).parts == []


def test_links_keep_their_plans(travel):
    other = travel(LINKS)
    assert type(other) is KVLinks
    assert other == LINKS
    assert str(other) == str(LINKS)


@pytest.mark.parametrize(
    "value",
    [
        LAYOUT,
        ENTRIES[0],
        ARGS,
        KVSendCursor(42, 16, 16),
        KVChunk(0, 16, 0, 1, False, 16),
        KVTransferRequest(
            room=5, host="h", port=1, session_id="s", aux_index=0, required_count=1,
            page_indices=[2, 3],
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_travel_whole(value, travel):
    other = travel(value)
    assert type(other) is type(value)
    assert other == value
    assert repr(other) == repr(value)
    assert vars(other) == vars(value) if isinstance(value, KVArgs) else True


def test_a_layout_keeps_every_field(travel):
    assert travel(LAYOUT).to_dict() == LAYOUT.to_dict()


def test_a_status_keeps_how_far_it_came(travel):
    status = TransferStatus(-7, num_batches=3, first_failed_batch=1, attempts=2)
    other = travel(status)
    assert type(other) is TransferStatus
    assert (int(other), vars(other)) == (-7, vars(status))


def test_an_engine_stays_in_its_process():
    with LocalEngine() as engine:
        ways = [partial(pickle.dumps, protocol=p) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
        for way in (*ways, copy.copy, copy.deepcopy):
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


def test_parts_are_read_whatever_their_iterator_does():
    class Tuple(tuple):
        def __iter__(self):
            raise RuntimeError

    parts = Tuple([Tuple(("k", 1, 2))])
    assert TransferPlan([1, 2], [3, 4], [5, 6], parts).parts == [("k", 1, 2)]


def test_parts_of_a_plan_made_by_hand():
    plan = TransferPlan([1, 2], [3, 4], [5, 6], parts=[["k", 1, 1], ("index", 1, 1)])
    assert plan.parts == [("k", 1, 1), ("index", 1, 1)]
    assert plan == TransferPlan([1, 2], [3, 4], [5, 6])  # the blocks are what counts
