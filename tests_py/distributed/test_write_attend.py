# SPDX-License-Identifier: Apache-2.0
"""The rounds of KV heads by which attention that writes sends and computes side by side."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from cpattn.distributed.layers.rounds import head_rounds, side_by_side

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_kv_heads", "received", "largest", "expected"),
    [
        (8, 32 * MIB, None, [1] * 8),
        (8, 32 * MIB, 3, [1] * 8),
        (32, 32 * MIB, None, [4] * 8),
        (32, 32 * MIB, 3, [3] * 10 + [2]),
        (8, 4 * MIB, None, [2] * 4),
        (8, MIB, None, [8]),
        (5, 4 * MIB, None, [2, 2, 1]),
        (1, 4 * MIB, 1, [1]),
    ],
)
def test_heads_go_in_rounds(num_kv_heads, received, largest, expected):
    rounds = head_rounds(num_kv_heads, received, 1000 * received, largest)
    assert [heads.stop - heads.start for heads in rounds] == expected
    assert [head for heads in rounds for head in range(heads.start, heads.stop)] == list(
        range(num_kv_heads)
    )


def test_what_computes_far_longer_than_it_receives_goes_at_once():
    assert head_rounds(8, 32 * MIB, 60_000 * 32 * MIB) == [slice(0, 8)]
    assert head_rounds(8, 32 * MIB, 60_000 * 32 * MIB, 4) == [slice(0, 4), slice(4, 8)]


def test_two_rounds_are_under_way_at_most():
    events = []
    heads = [slice(i, i + 1) for i in range(4)]

    def begin(which, buffer):
        events.append(f"begin {which.start} in {buffer}")
        return which

    def compute(which, arriving):
        assert arriving is which
        events.append(f"compute {which.start}")

    side_by_side(heads, begin, compute)
    assert events == [
        "begin 0 in 0", "begin 1 in 1", "compute 0", "begin 2 in 0", "compute 1", "begin 3 in 1",
        "compute 2", "compute 3",
    ]  # fmt: skip
