# SPDX-License-Identifier: Apache-2.0
"""Whole scenarios of attention under context parallelism, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cpattn
from support.cases import Case, assert_attention, dense, make_inputs, packed

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


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tree_of_drafts_split_over_ranks(isa, strategy, cp_size):
    """Each rank is given the mask of all drafts; together they compute what one process does."""
    drafts, prefixes = (19, 1, 40), (50, 3, 270)
    case = Case(
        q_lens=drafts,
        kv_lens=tuple(d + p for d, p in zip(drafts, prefixes, strict=True)),
        dtype="bfloat16",
    )
    rng = np.random.default_rng(cp_size)
    masks = [tree_mask(random_tree(d, rng), p) for d, p in zip(drafts, prefixes, strict=True)]
    inputs = make_inputs(case) | {"causal": False, "scale": 0.125}
    inputs["custom_mask"] = dense(masks)
    whole, whole_lse = cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True)
    assert_attention(whole, whole_lse, inputs)

    ranks = cpattn.build_cp_metadata_all_ranks(
        drafts, case.kv_lens, cp_size=cp_size, strategy=strategy
    )
    q = inputs["q"].flatten(1).contiguous()
    for mask in ({"custom_mask": dense(masks)}, {"packed_custom_mask": packed(masks)}):
        parts = [
            cpattn.do_cp_attn_fia(
                metadata.shard(q),
                inputs["k_cache"].contiguous(),
                inputs["v_cache"].contiguous(),
                metadata,
                block_tables=inputs["block_tables"],
                page_size=case.page_size,
                num_heads=case.num_heads,
                num_kv_heads=case.num_kv_heads,
                scale=0.125,
                causal=False,
                return_lse=True,
                **mask,
            )
            for metadata in ranks
        ]
        out, lse = (ranks[0].unshard(list(part)) for part in zip(*parts, strict=True))
        assert torch.equal(out, whole.flatten(1))
        assert torch.equal(lse, whole_lse)


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
