# SPDX-License-Identifier: Apache-2.0
"""The block map shows what the plan says."""

import re

import pytest

from cpattn import build_cp_metadata_all_ranks
from cpattn_lab.explain import block_map


@pytest.mark.parametrize("strategy", ["zigzag", "interleave", "contiguous"])
def test_bars_and_table_show_the_plan(strategy):
    extend, seq = [13, 0, 40], [13, 5, 104]
    text = block_map(extend, seq, cp_size=4, strategy=strategy)
    plans = build_cp_metadata_all_ranks(extend, seq, cp_size=4, strategy=strategy)

    assert text.startswith(f"{strategy} over 4 ranks: 3 sequences, 53 new tokens\n")
    assert "sequence 2: 40 new tokens, 64 cached" in text
    marks = "".join(re.findall(r"^  ([0-3]+)$", text, flags=re.MULTILINE))
    for plan in plans:
        owned = [t for t, mark in enumerate(marks) if int(mark) == plan.cp_rank]
        assert owned == sorted(plan.local_q_indices.tolist())
    lines = text.splitlines()
    begin = lines.index("", len(lines) - 10) + 2
    table = [line.split() for line in lines[begin : begin + 4]]
    for plan, row in zip(plans, table, strict=True):
        assert int(row[0]) == plan.cp_rank
        assert int(row[1]) == len(plan.local_q_indices)
        assert int(row[3]) == plan.query_cache_lengths.sum()
        assert int(row[5]) == plan.pad_to_physical().per_rank_actual_token[plan.cp_rank]


def test_long_sequences_are_scaled_and_runs_cut():
    text = block_map([10_000], cp_size=40, strategy="interleave")
    lines = text.splitlines()
    assert len(lines[3]) == 80
    assert lines[4] == "  rank 0: 0 40 80 ..."
    assert "+" in block_map([10_000], cp_size=40)
    assert "ranks in bars: 0-9, a-z, then +; pairs: " in text.replace("\n", " ")
    assert "ranks in bars: 0-9, a-b; " in block_map([100], cp_size=12)


@pytest.mark.parametrize(
    ("strategy", "width"),
    [("zigzag", 20), ("interleave", 20), ("contiguous", 20), ("zigzag", 60), ("contiguous", 120)],
)
def test_the_map_fits_and_its_numbers_stand_apart(strategy, width):
    extend, seq = [12_500_000, 900], [13_500_000, 900]
    lines = block_map(extend, seq, cp_size=4, strategy=strategy, width=width).splitlines()
    table = [line for line in lines if line.startswith(("rank  ", *(f"   {r} " for r in range(4))))]
    assert [len(line.split()) for line in table] == [4, 6, 6, 6, 6]
    assert len({len(line) for line in table}) == 1
    assert all(len(line) <= width for line in lines if line not in table)
    assert max(map(len, table)) <= 60
    legend = " ".join(lines[lines.index(table[-1]) + 1 :])
    for word in ("pairs:", "x:", "padded:"):
        assert word in legend


@pytest.mark.parametrize(
    ("width", "error", "message"),
    [
        (19, ValueError, "block_map: width must be >= 20, got 19"),
        (80.0, TypeError, "block_map: width must be an int, got 80.0"),
        (True, TypeError, "block_map: width must be an int, got True"),
    ],
)
def test_a_width_that_cannot_be_is_refused(width, error, message):
    with pytest.raises(error, match=message):
        block_map([3], cp_size=2, width=width)
