# SPDX-License-Identifier: Apache-2.0
"""Entries paired by the layer they name, layers and ranks as the two servers count them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import build_transfer_entry_pairs, decode_targets, kv_start_layer


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_pairs_take_the_next_unused_occurrence(src, dst):
    expected, used = [], set()
    for i, layer in enumerate(src):
        free = [j for j, other in enumerate(dst) if other == layer and j not in used]
        if not free:
            break
        used.add(free[0])
        expected.append((i, free[0]))
    arguments = src, dst, len(src), len(dst)
    if not src or (dst and len(expected) == len(src)):
        assert build_transfer_entry_pairs(*arguments) == expected
        return
    with pytest.raises(RuntimeError, match=r"missing a transfer entry for model|both PD peers"):
        build_transfer_entry_pairs(*arguments)


def test_pairs_without_ids():
    pairs, either_way = build_transfer_entry_pairs, {"allow_positional_fallback": True}
    assert pairs(None, None, 0, 5) == []
    assert pairs(None, [], 2, 2) == [(0, 0), (1, 1)]
    assert pairs(None, None, 2, 3, **either_way) == [(0, 0), (1, 1)]
    assert pairs([1, 2], None, 2, 3, **either_way)[1] == (1, 1)
    for arguments, options, message in [
        (([1, 2], None, 2, 2), {}, "both PD peers or neither, got 2 ids of the source and 0 of"),
        ((None, None, 2, 3), {}, "requires layer ids on both peers; got src=2 dst=3"),
        ((None, None, 3, 2), either_way, "requires layer ids on both peers; got src=3 dst=2"),
        (([1], [1, 2], 2, 2), {}, "src metadata=1 entries=2, dst metadata=2 entries=2"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            pairs(*arguments, **options)
    with pytest.raises(ValueError, match=r"n_src and n_dst must be in \[0, 16777216\], got -1"):
        pairs(None, None, -1, 2)


def test_start_layers_of_hybrid_models():
    for start, ids, found in (
        (31, [3, 31, 40], 1), (99, [3, 31, 40], 3), (0, [], 0), (30, range(3, 60, 4), 7)
    ):  # fmt: skip
        assert kv_start_layer(start, list(ids)) == found
    with pytest.raises(ValueError, match="kv_layer_ids must ascend, got no ascent at index 2"):
        kv_start_layer(1, [3, 5, 5])
    with pytest.raises(ValueError, match="start_layer must be >= 0, got -1"):
        kv_start_layer(-1, [3])


@pytest.mark.parametrize(
    ("rank", "prefill", "decode", "message"),
    [
        (0, 4, 6, "must divide the other, got 4 and 6"),
        (0, 0, 6, "must divide the other, got 0 and 6"),
        (-1, 2, 2, "engine_rank must be >= 0, got -1"),
    ],
)
def test_decode_targets_refuse(rank, prefill, decode, message):
    with pytest.raises(ValueError, match=message):
        decode_targets(rank, prefill_tp_size=prefill, decode_tp_size=decode, is_mla=True)
