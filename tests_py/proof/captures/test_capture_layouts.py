# SPDX-License-Identifier: Apache-2.0
"""Records of how an engine shared out batches over ranks: files that come from anywhere."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.captures import capture
from cpattn.captures.lines import to_line
from cpattn.context_parallel.vllm_0_32 import pcp_segments
from cpattn.profiling.calls import announced
from cpattn_proof import NotUsable, lint, read_captures
from cpattn_proof.linting.adapters.captures import from_capture
from support.proof.plans import segments_of_vllm

LENS = [[40, 1, 5], [16, 24, 0]]


@announced("PCPManager._build_batch_layout")
def lay_out(manager, num_scheduled_tokens, num_computed_tokens):
    """Return segments of all ranks, as objects like vLLM's, and the tokens of each rank."""
    ranks = pcp_segments(num_scheduled_tokens, num_computed_tokens, pcp_size=manager.pcp_world_size)
    return segments_of_vllm(ranks), [int(rank.rank_stop[-1]) for rank in ranks]


def record(folder, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    with capture(folder / f"{rank}.cpcap") as path:
        lay_out(SimpleNamespace(pcp_rank=rank, pcp_world_size=2), *LENS)
    return path


def test_ranks_that_agree_are_proved(tmp_path, monkeypatch):
    paths = [record(tmp_path, monkeypatch, rank) for rank in range(2)]
    (document,) = from_capture(read_captures(paths))
    assert lint(document).proved
    document["ranks"][1]["segments"]["keys"][-1] -= 1
    assert "COV" in {found.invariant for found in lint(document, shrink=False).findings}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cp_rank": 2}, "1.cpcap, line 2: must be of one rank of 2, got rank 2 of 2"),
        ({"cp_size": 3}, "1.cpcap, line 2: must be of one rank of 2, got rank 1 of 3"),
        ({"cp_rank": 0}, "capture must have as many of each rank, got [2, 0]"),
        ({"prefix_lens": np.array([16, 24])}, "lengths must be those of rank 0 in this batch"),
        ({"extend_lens": np.array([40, 2, 5])}, "lengths must be those of rank 0 in this batch"),
        ({"segments": np.zeros((1, 5), int)}, "segments must have 6 columns, of 3 requests"),
        ({"segments": np.full((1, 6), 3)}, "segments must have 6 columns, of 3 requests"),
        ({"segments": np.full((1, 6), -1)}, "segments must be an array of 2 dimensions"),
    ],
)
def test_a_file_that_does_not_fit_is_named(change, message, tmp_path, monkeypatch):
    paths = [record(tmp_path, monkeypatch, rank) for rank in range(2)]
    (call,) = read_captures(paths[1:]).calls
    times = {"call": call.name, "at": call.at, "seconds": call.seconds}
    header, _ = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(header + to_line({**times, **call.fields, **change}))
    with pytest.raises(NotUsable) as refused:
        from_capture(read_captures(paths))
    assert message in str(refused.value)
