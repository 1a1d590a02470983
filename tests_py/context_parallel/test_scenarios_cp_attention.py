# SPDX-License-Identifier: Apache-2.0
"""Whole scenarios at their sizes: all ranks give the bits of one process, and the oracle's numbers.

Heads are few and narrow, tokens as many as stated. The oracle computes a sample of the rows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cpattn
from support.cases import Case, assert_attention, dense, make_inputs
from support.cp_batches import STRATEGIES, on_ranks

SMALL = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "page_size": 64}
SAMPLE = 24


class Scenario:
    """A batch, and attention of it by any number of ranks."""

    def __init__(self, extends, prefixes, **options):
        kv_lens = tuple(e + p for e, p in zip(extends, prefixes, strict=True))
        self.case = Case(q_lens=tuple(extends), kv_lens=kv_lens, **SMALL)
        self.options = options
        self.inputs = make_inputs(self.case) | {"scale": 0.25}
        self.caches = [self.inputs[name].contiguous() for name in ("k_cache", "v_cache")]

    def whole(self):
        return cpattn.paged_attention(
            **self.inputs | self.options, batch_invariant=True, return_lse=True
        )

    def ranks(self, cp_size, strategy):
        sizes = {"page_size": self.case.page_size, "num_kv_heads": self.case.num_kv_heads}
        return on_ranks(
            self.inputs["q"], self.caches, self.case.q_lens, self.case.kv_lens, cp_size, strategy,
            block_tables=self.inputs["block_tables"], scale=0.25, **sizes, **self.options,
        )  # fmt: skip

    def check(self, cp_size, strategies=STRATEGIES):
        whole = self.whole()
        self.check_sample(*whole)
        for strategy in strategies:
            assert all(map(torch.equal, self.ranks(cp_size, strategy), whole)), strategy
        return whole

    def check_sample(self, out, lse):
        """Rows, the first and the last of each of a few sequences among them, by the oracle."""
        starts = np.concatenate([[0], np.cumsum(self.case.q_lens)])
        total = int(starts[-1])
        chosen = {0, total - 1, *np.random.default_rng(0).integers(0, total, SAMPLE).tolist()}
        rows = np.array(sorted(chosen | set((starts[1:4] - 1).tolist())))
        sequence = np.searchsorted(starts, rows, side="right") - 1
        prefixes = np.subtract(self.case.kv_lens, self.case.q_lens)
        sampled = self.inputs | self.options | {
            "q": self.inputs["q"][rows],
            "q_lens": [1] * len(rows),
            "kv_lens": (prefixes[sequence] + rows - starts[sequence] + 1).tolist(),
            "block_tables": self.inputs["block_tables"][sequence],
        }  # fmt: skip
        assert_attention(out[rows], lse[rows], sampled)


def test_256_sequences_of_17_over_eight_ranks():
    """Rank 0 has 41 % more of the blocks of one and two tokens than the last."""
    scenario = Scenario([17] * 256, [0] * 256)
    scenario.check(8)
    plan = cpattn.build_cp_metadata([17] * 256, cp_rank=0, cp_size=8)
    rows = plan.per_rank_actual_token
    assert rows[0] == 3 * 256
    assert set(rows[1:]) == {2 * 256}
    assert 100 * 8 * max(rows) // sum(rows) == 141  # percent of the mean


@pytest.mark.slow
def test_one_sequence_of_16k_and_one_of_8():
    Scenario([16384, 8], [0, 0]).check(8)


@pytest.mark.slow
def test_five_tokens_behind_128k():
    Scenario([5], [131072]).check(8)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_8k_in_one_step_or_in_chunks(strategy):
    """Chunks are four of 2K, or three that end within a page and within a zigzag block."""
    whole = Scenario([8192], [0])
    out, lse = whole.ranks(8, strategy)
    whole.check_sample(out, lse)
    for chunks in ([2048] * 4, [2501, 777, 4914]):
        end, parts = 0, []
        for chunk in chunks:
            step = Scenario([chunk], [end])
            step.caches = whole.caches
            step.inputs |= {
                "q": whole.inputs["q"][end : end + chunk],
                "block_tables": whole.inputs["block_tables"],
            }
            parts.append(step.ranks(8, strategy))
            end += chunk
        assert torch.equal(torch.cat([part[0] for part in parts]), out)
        assert torch.equal(torch.cat([part[1] for part in parts]), lse)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [3, 4])
def test_drafts_verified_before_there_are_so_many_tokens(cp_size, strategy):
    """Two of four drafts stand before the first token: they see -1, 0, 1 and 2 keys.

    Metadata cannot have a sequence shorter than its new tokens; the mask says what there is.
    """
    q_lens, kv_lens = [4, 4, 4], [2, 9, 40]
    verified = Scenario([2, 4, 4], [0, 5, 36])
    q = torch.cat([torch.ones(2, 2, 16), verified.inputs["q"]])
    short = verified.inputs | {"q": q, "q_lens": q_lens, "kv_lens": kv_lens}
    expected = cpattn.paged_attention(
        **short, allow_short_kv=True, batch_invariant=True, return_lse=True
    )
    assert torch.all(expected[0][:2] == 0)
    assert torch.all(torch.isneginf(expected[1][:2]))
    masks = [
        np.ones((q_len, max(q_len, kv)), bool) for q_len, kv in zip(q_lens, kv_lens, strict=True)
    ]
    masks[0] = np.tril(np.ones((4, 4), bool), -2)  # keys 2 and 3 are slots that nobody sees
    masked = Scenario([4, 4, 4], [0, 5, 36], custom_mask=dense(masks))
    masked.inputs = short | {"q": q}
    masked.caches = [cache.nan_to_num() for cache in verified.caches]
    assert all(map(torch.equal, masked.ranks(cp_size, strategy), expected))


@pytest.mark.parametrize("window", [0, 255, 256, 2000])
def test_windows_within_and_over_the_blocks_of_eight_ranks(window):
    """Windows are shorter than a block of 256, as long, over several, and into the prefix."""
    Scenario([4096, 37], [1000, 300], window=window).check(8)


@pytest.mark.parametrize("sinks", [(0.5, -2.0), (np.inf, -np.inf), (8.0, -8.0)])
def test_sinks_count_once(sinks):
    """Sinks do not count for each rank, block or part; they take all of the weight, or none."""
    out, _ = Scenario([700, 33], [90, 500], sinks=torch.tensor(sinks)).check(8)
    plain, _ = Scenario([700, 33], [90, 500]).whole()
    assert not torch.equal(out[:, 0], plain[:, 0])
    if np.inf in sinks:
        assert torch.all(out[:, 0] == 0)
        assert torch.equal(out[:, 1], plain[:, 1])


def test_sinks_and_windows_of_a_long_prompt():
    Scenario([3000], [1500], window=127, sinks=torch.tensor([1.5, -0.5])).check(7)
