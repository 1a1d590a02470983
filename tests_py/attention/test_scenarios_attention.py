# SPDX-License-Identifier: Apache-2.0
"""Whole scenarios of attention under context parallelism, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cpattn
from support.cases import Case, assert_attention, make_inputs

STRATEGIES = ("zigzag", "interleave", "contiguous")


def tree_mask(parents: list[int], prefix: int) -> np.ndarray:
    """[drafts, prefix + drafts]: a draft sees the prefix, its ancestors and itself."""
    sees = np.zeros((len(parents), prefix + len(parents)), bool)
    sees[:, :prefix] = True
    for draft, parent in enumerate(parents):
        if parent >= 0:
            sees[draft] |= sees[parent]
        sees[draft, prefix + draft] = True
    return sees


def random_tree(drafts: int, rng: np.random.Generator) -> list[int]:
    return [int(rng.integers(-1, max(draft, 1))) if draft else -1 for draft in range(drafts)]


def rank_inputs(inputs, metadata, masks):
    """Arguments of the rows of one rank: fewer queries behind the same keys, their mask rows."""
    rows = torch.from_numpy(metadata.local_q_indices.astype(np.int64))
    starts = np.concatenate([[0], np.cumsum(inputs["q_lens"])])
    sequence = np.searchsorted(starts, rows.numpy(), side="right") - 1
    order = np.argsort(sequence, kind="stable")  # zigzag lists all first blocks before the second
    rows, sequence = rows[order], sequence[order]
    mine = [masks[s][rows.numpy()[sequence == s] - starts[s]] for s in range(len(masks))]
    return rows, inputs | {
        "q": inputs["q"][rows],
        "q_lens": [len(mask) for mask in mine],
        "custom_mask": np.concatenate([mask.ravel() for mask in mine]),
    }


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tree_of_drafts_split_over_ranks(isa, strategy, cp_size):
    """Each rank computes its rows with its rows of the mask; together they are one process's."""
    drafts, prefixes = (19, 1, 40), (50, 3, 270)
    case = Case(
        q_lens=drafts,
        kv_lens=tuple(d + p for d, p in zip(drafts, prefixes, strict=True)),
        dtype="bfloat16",
    )
    rng = np.random.default_rng(cp_size)
    masks = [tree_mask(random_tree(d, rng), p) for d, p in zip(drafts, prefixes, strict=True)]
    inputs = make_inputs(case) | {"causal": False, "scale": 0.125}
    inputs["custom_mask"] = np.concatenate([mask.ravel() for mask in masks])
    whole, whole_lse = cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True)
    assert_attention(whole, whole_lse, inputs)

    ranks = cpattn.build_cp_metadata_all_ranks(
        drafts, case.kv_lens, cp_size=cp_size, strategy=strategy
    )
    computed = torch.zeros(sum(drafts), dtype=torch.int64)
    for metadata in ranks:
        rows, mine = rank_inputs(inputs, metadata, masks)
        out, lse = cpattn.paged_attention(**mine, batch_invariant=True, return_lse=True)
        assert torch.equal(out, whole[rows])
        assert torch.equal(lse, whole_lse[rows])
        computed[rows] += 1
    assert torch.all(computed == 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eight_ranks_give_the_bits_of_one(isa, strategy):
    """Blocks of keys, groups of rows and threads fall differently; the bits do not."""
    case = Case(
        q_lens=(333, 1, 70), kv_lens=(800, 300, 70), num_heads=6, page_size=32, dtype="bfloat16"
    )
    inputs = make_inputs(case)
    q = inputs["q"].flatten(1).contiguous()
    caches = [inputs[name].nan_to_num().contiguous() for name in ("k_cache", "v_cache")]

    def attend(cp_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = cpattn.build_cp_metadata_all_ranks(
            case.q_lens, case.kv_lens, cp_size=cp_size, strategy=strategy
        )
        parts = [
            cpattn.do_cp_attn_fia(
                metadata.shard(q),
                *caches,
                metadata,
                block_tables=inputs["block_tables"],
                page_size=case.page_size,
                num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads,
                scale=None,
                return_lse=True,
            )
            for metadata in ranks
        ]
        out, lse = (ranks[0].unshard(list(part)) for part in zip(*parts, strict=True))
        return out, lse

    one, eight = attend(1), attend(8)
    assert torch.equal(one[0], eight[0])
    assert torch.equal(one[1], eight[1])
    finite = inputs | dict(zip(("k_cache", "v_cache"), caches, strict=True))
    whole = one[0].unflatten(1, (case.num_heads, case.head_dim))
    assert_attention(whole, one[1], finite)
