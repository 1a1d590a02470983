# SPDX-License-Identifier: Apache-2.0
"""Documents of prefill context parallelism: right layouts are proved, damaged ones refuted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.context_parallel.vllm_0_32 import build_pcp_layout
from cpattn_proof import NotUsable, lint
from cpattn_proof.linting.adapters.pcp import from_segments
from support.proof.plans import kinds, segments_of_vllm

EXTEND, PREFIX = [9, 1, 3], [0, 5, 2]  # a prefill, a decode, a short prefill


def gathered(layout):
    return {
        "hidden_restore_idx": layout.hidden_restore_idx,
        "padded_gather_idx": layout.padded_gather_idx,
        "gathered_slots": np.where(
            layout.gathered_kv_write_mask, layout.padded_gather_idx + 7, -1
        ),
    }  # fmt: skip


lens = st.integers(0, 20)


@given(
    st.lists(st.tuples(lens, lens), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 2),
    st.booleans(), st.none() | st.integers(0, 9),
)  # fmt: skip
def test_layouts_are_proved(requests, pcp_size, dcp_size, shard_decode, window):
    extend, prefix = ([request[i] for request in requests] for i in range(2))
    options = {"pcp_size": pcp_size, "dcp_size": dcp_size, "shard_decode": shard_decode}
    layout = build_pcp_layout(extend, prefix, **options)
    given = gathered(layout) if sum(extend) else {}
    for replicated in (None, layout.replicated):
        document = from_segments(
            layout.segments, extend, prefix, seq_lens=layout.seq_lens, replicated=replicated,
            window=window, **given,
        )  # fmt: skip
        report = lint(document)
        assert report.findings == ()
        assert "OWN" in report.checked
        assert ("COV" in report.checked) or not sum(extend)


def test_objects_of_an_engine_are_the_same_document():
    layout = build_pcp_layout(EXTEND, PREFIX, pcp_size=2)
    objects = segments_of_vllm(layout.segments)
    expected = from_segments(layout.segments, EXTEND, PREFIX)
    assert from_segments(objects, EXTEND, PREFIX) == expected
    assert [request["queries"] for request in expected["requests"]] == ["split"] * 3
    assert from_segments([[], *objects], EXTEND, PREFIX)["ranks"][0]["rows"]["count"] == []


@pytest.mark.parametrize("options", [{"shard_decode": False}, {"dcp_size": 2}])
def test_faults_of_replicated_requests(options):
    layout = build_pcp_layout(EXTEND, PREFIX, pcp_size=2, **options)
    keys = [lens.copy() for lens in layout.seq_lens]
    keys[1][0] -= 1  # of the decode, on the other rank
    assert kinds(from_segments(layout.segments, EXTEND, PREFIX, seq_lens=keys)) == {"cov-pair"}
    segments = list(layout.segments)
    segments[1] = [column[1:] for column in segments[1]]
    rows = segments[1]
    rows[3], rows[4] = rows[3] - 1, rows[4] - 1
    flags = layout.replicated
    assert "own-token" in kinds(from_segments(segments, EXTEND, PREFIX, replicated=flags))


def test_faults_of_what_is_gathered():
    layout = build_pcp_layout(EXTEND, PREFIX, pcp_size=2, shard_decode=False)
    given = gathered(layout)
    second = given | {"gathered_slots": layout.padded_gather_idx + 7}  # without the mask
    assert kinds(from_segments(layout.segments, EXTEND, PREFIX, **second)) == {"own-slot"}
    swapped = given | {"hidden_restore_idx": given["hidden_restore_idx"][::-1]}
    assert kinds(from_segments(layout.segments, EXTEND, PREFIX, **swapped)) == {"own-restore"}
    for wrong in (None, np.zeros(5, int)):
        with pytest.raises(NotUsable, match="as many rows of each of 2 ranks"):
            from_segments(
                layout.segments, EXTEND, PREFIX, gathered_slots=[1], padded_gather_idx=wrong
            )
