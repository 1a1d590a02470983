# SPDX-License-Identifier: Apache-2.0
"""The block map shows what the plan says."""

from __future__ import annotations

import re

import pytest

from cpattn import build_cp_metadata_all_ranks
from cpattn.explain import block_map


@pytest.mark.parametrize("strategy", ["zigzag", "interleave", "contiguous"])
def test_bars_and_table_show_the_plan(strategy):
    extend, cached = [13, 0, 40], [0, 5, 64]
    text = block_map(extend, cached, cp_size=4, strategy=strategy)
    plans = build_cp_metadata_all_ranks(extend, [13, 5, 104], cp_size=4, strategy=strategy)

    assert text.startswith(f"{strategy} over 4 ranks: 3 sequences, 53 new tokens\n")
    assert "sequence 2: 40 new tokens, 64 cached" in text
    marks = "".join(re.findall(r"^  ([0-3]+)$", text, flags=re.MULTILINE))
    for plan in plans:
        owned = [t for t, mark in enumerate(marks) if int(mark) == plan.cp_rank]
        assert owned == sorted(plan.local_q_indices.tolist())
    table = [line.split() for line in text.splitlines()[-4:]]
    for plan, row in zip(plans, table, strict=True):
        assert int(row[0]) == plan.cp_rank
        assert int(row[1]) == len(plan.local_q_indices)
        assert int(row[3]) == plan.query_cache_lengths.sum()
        assert int(row[5]) == plan.pad_to_physical().per_rank_actual_token[plan.cp_rank]


def test_long_sequences_are_scaled_and_runs_cut():
    text = block_map([10_000], cp_size=40, strategy="interleave")
    lines = text.splitlines()
    assert len(lines[3]) == 82
    assert lines[4] == "  rank 0: 0 40 80 ..."
    assert "+" in block_map([10_000], cp_size=40)


def test_bad_prefixes_are_refused():
    with pytest.raises(ValueError, match=r"prefix_lens must have as many .* got 1 and 2"):
        block_map([3, 4], [1], cp_size=2)
    with pytest.raises(ValueError, match=r"prefix_lens must be >= 0, got -1"):
        block_map([3, 4], [1, -1], cp_size=2)
    with pytest.raises(ValueError, match="extend_lens must be >= 0 and fit into int32, got -4"):
        block_map([3, -4], cp_size=2)
    with pytest.raises(ValueError, match="at least one sequence"):
        block_map([], cp_size=2)
