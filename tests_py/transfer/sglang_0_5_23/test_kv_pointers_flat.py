# SPDX-License-Identifier: Apache-2.0
"""Lists with one entry for each layer, and drafts at their end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer import get_mla_kv_ptrs_with_pp

FLAT = {"prefill_start_layer": 2, "num_draft_entries": 1}


def test_drafts_at_the_end_of_flat_lists():
    decode = ["K0", "K1", "K2", "K3", "dK"]
    for compat in (False, True):
        found = get_mla_kv_ptrs_with_pp(["K2", "K3", "dK"], decode, **FLAT, compat=compat)
        assert found == (["K2", "K3", "dK"], ["K2", "K3", "dK"], 3)
        middle = {"prefill_start_layer": 1, "total_kv_layers": 4, "compat": compat}
        assert get_mla_kv_ptrs_with_pp(["K1", "K2"], decode, **middle)[1] == ["K1", "K2"]


def test_drafts_that_decode_has_not_or_has_more_of():
    stage = ["K2", "K3", "dK"]
    none, more = ["K0", "K1", "K2", "K3"], ["K0", "K1", "K2", "K3", "dK0", "dK1"]
    assert get_mla_kv_ptrs_with_pp(stage, none, **FLAT, compat=True)[1] == ["K2", "K3", "K3"]
    assert get_mla_kv_ptrs_with_pp(stage, more, **FLAT, compat=True)[1] == ["K2", "K3", "dK1"]
    for decode, num_drafts in ((none, 0), (more, 2)):
        message = f"must hold as many drafts as the source, got {num_drafts}; "
        with pytest.raises(ValueError, match=message):
            get_mla_kv_ptrs_with_pp(stage, decode, **FLAT)


@given(st.integers(1, 8), st.integers(0, 3), st.data())
def test_stages_and_layer_splits_of_flat_lists(num_layers, drafts, data):
    decode = [f"K{i}" for i in range(num_layers)] + [f"dK{i}" for i in range(drafts)]
    cuts = sorted(data.draw(st.lists(st.integers(0, num_layers), max_size=3)))
    arrived = []
    for start, end in zip([0, *cuts], [*cuts, num_layers], strict=True):
        is_last = len(arrived) + end - start == num_layers and end == num_layers and start < end
        own = decode[start : len(decode) if is_last else end]
        found = get_mla_kv_ptrs_with_pp(
            own, decode, prefill_start_layer=start, total_kv_layers=num_layers,
            num_draft_entries=drafts if is_last else 0,
        )  # fmt: skip
        assert found == (own, own, len(own))
        arrived += found[1]
    assert arrived[:num_layers] == decode[:num_layers]


@pytest.mark.parametrize(
    ("ptrs", "options", "message"),
    [
        ([1, 2], {"kv_buf_groups": 2}, "kv_buf_groups must be 1 with num_draft_entries, got 2"),
        ([1, 2], {"kv_buf_groups": 2, "compat": True}, "kv_buf_groups must be 1 with num_draft_en"),
        ([1, 2, 3], {"num_draft_entries": -1}, "num_draft_entries must be between 0 and the 3 .*"),
        ([1, 2, 3], {"num_draft_entries": 4}, "num_draft_entries must be between 0 and the 3 .* g"),
        ([1], {"num_draft_entries": 2**40}, "num_draft_entries must fit into int32"),
    ],
)
def test_drafts_of_flat_lists_refused(ptrs, options, message):
    with pytest.raises(ValueError, match=f"^get_mla_kv_ptrs_with_pp: {message}"):
        get_mla_kv_ptrs_with_pp(ptrs, [4] * 9, **(FLAT | options))
