# SPDX-License-Identifier: Apache-2.0
"""Handshakes name the fields that have to be the same but differ."""

import json
import pickle

import pytest

from cpattn.transfer import KVEntry, KVHandshake, KVHandshakeError, KVLayout


def layout(*, page_size=8, row=64, dtype="bfloat16", kinds=("k", "v"), layers=range(4), **more):
    heads = more.get("total_kv_heads", 2) // more.get("tp_size", 1)
    entries = [
        KVEntry(
            layer, kind, False, (1 << 30) + (i << 20), 4 * row * heads * page_size,
            row * heads * page_size, dtype=dtype,
        )
        for i, (layer, kind) in enumerate((layer, kind) for layer in layers for kind in kinds)
    ]  # fmt: skip
    return KVLayout(entries, page_size, **{"total_kv_heads": 2, **more})


def told(here, there, mine=None, theirs=None):
    """Return the differences of two sides; the other one's message goes over the wire."""
    message = json.loads(json.dumps(KVHandshake(there, theirs or {}).to_dict()))
    found = KVHandshake(here, mine or {}).differences(KVHandshake.from_dict(message))
    return [str(one) for one in found]


def test_sides_that_plans_can_serve_do_not_differ():
    assert not told(layout(), layout(page_size=16, tp_rank=1, tp_size=2))
    stage = KVLayout(layout(layers=range(2, 4)).entries, 8, total_kv_heads=2, layers=(2, 4))
    assert not told(layout(), stage)
    assert not told(layout(dtype=""), layout(dtype="float16"))


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            layout(dtype="float16"),
            [f"dtype of {kind}, layers 0-3: 'bfloat16' here, 'float16' there" for kind in "kv"],
        ),
        (
            layout(row=32),
            [
                f"bytes of a token and head of {kind}, layers 0-3: 64 here, 32 there"
                for kind in "kv"
            ],
        ),
        (layout(layers=[0, 2]), ["kinds, layers 1, 3: 'k v' here, None there"]),
        (
            layout(kinds=("k", "v", "k_scale")),
            ["kinds, layers 0-3: 'k v' here, 'k k_scale v' there"],
        ),
        (layout(total_kv_heads=4), ["total_kv_heads: 2 here, 4 there"]),
    ],
)  # fmt: skip
def test_fields_of_the_layout_are_named(there, said):
    assert told(layout(), there) == said


def test_facts_are_named_and_one_side_is_not_enough():
    found = told(
        layout(), layout(),
        {"model": "a", "tp": 1}, {"model": "b", "tp": 1, "window": 5},
    )  # fmt: skip
    assert found == [
        "model: 'a' here, 'b' there", "window: None here, 5 there",
    ]  # fmt: skip


def test_draft_layers_count_where_both_have_some():
    draft = [KVEntry(0, "k", True, 1 << 20, 4096, 1024), KVEntry(1, "k", True, 1 << 21, 4096, 1024)]
    one = KVLayout([*layout().entries, draft[0]], 8, total_kv_heads=2)
    both = KVLayout([*layout().entries, *draft], 8, total_kv_heads=2)
    assert not told(layout(), both)
    assert told(one, both) == ["kinds, draft layer 1: None here, 'k' there"]


def test_pages_that_are_no_rows_have_a_size():
    def side(page_size):
        entry = KVEntry(0, "index_k", False, 4096, 132 * page_size, 132 * page_size, False)
        return KVLayout([entry], page_size)

    assert told(side(64), side(32)) == [
        "page_size of index_k, layer 0: 64 here, 32 there",
        "item_len of index_k, layer 0: 8448 here, 4224 there",
    ]


def test_the_error_has_all_of_it():
    with pytest.raises(KVHandshakeError, match=r"^KVHandshake.check: 2 fields differ: ") as caught:
        KVHandshake(layout()).check(KVHandshake(layout(dtype="float16")))
    again = pickle.loads(pickle.dumps(caught.value))
    assert [one.field for one in again.differences] == [
        "dtype of k, layers 0-3", "dtype of v, layers 0-3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: KVHandshake([]), TypeError, "layout must be a KVLayout, got list"),
        (lambda: KVHandshake(layout(), {"a": []}), TypeError, "facts must map str to str"),
        (lambda: KVHandshake(layout()).check(layout()), TypeError, "peer must be a KVHandshake"),
        (lambda: KVHandshake.from_dict({"schema": 1}), ValueError, "fields must have schema"),
        (
            lambda: KVHandshake.from_dict(KVHandshake(layout()).to_dict() | {"schema": "x/2"}),
            ValueError, "schema must be cpattn-kv-handshake/1, got 'x/2'",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()
