# SPDX-License-Identifier: Apache-2.0
"""Batches of the sizes that servers meet, on every rank, against the oracle and one process."""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch

import cpattn
from support.cases import Case, assert_attention, make_inputs
from support.cp_batches import STRATEGIES, Batch
from support.sparse import sparse_mla_cases
from support.sparse.indexer_cases import best_keys
from support.sparse.indexer_cases import make_inputs as make_index_inputs

pytestmark = pytest.mark.slow


ONE_HEAD = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": "bfloat16"}
LONG = 32768


def assert_rows(out, lse, inputs, rows):
    """Compare these rows of the first sequence, each as a sequence of one query."""
    kv_len, q_len = inputs["kv_lens"][0], inputs["q_lens"][0]
    assert_attention(
        out[rows],
        lse[rows],
        inputs
        | {
            "q": inputs["q"][rows],
            "q_lens": [1] * len(rows),
            "kv_lens": [kv_len - q_len + row + 1 for row in rows],
            "block_tables": np.repeat(inputs["block_tables"][:1], len(rows), 0),
        },
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_many_prompts_of_seventeen_tokens_on_eight_ranks(strategy):
    """Seventeen is two for each rank and one: ranks with the remainders have far more tokens."""
    Batch((17,) * 256, (0,) * 256, 8, strategy, **ONE_HEAD).check()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_five_tokens_behind_a_prefix_of_a_hundred_thousand(strategy):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "page_size": 64}
    Batch((5,), (2**17,), 4, strategy, **sizes).check()


@functools.cache
def long_batch(cp_size, strategy):
    """A long prompt and one of eight tokens; out and lse of all rows."""
    batch = Batch((LONG, 8), (0, 0), cp_size, strategy, page_size=128, **ONE_HEAD)
    return batch, *batch.all_ranks()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_long_prompt_beside_a_short_one_on_eight_ranks(strategy):
    """Each row has the bits of one process; rows at the borders of blocks are the oracle's."""
    _, out, lse = long_batch(8, strategy)
    batch, one, one_lse = long_batch(1, "zigzag")
    assert torch.equal(out, one)
    assert torch.equal(lse, one_lse)
    block = LONG // 16
    rows = [0, block - 1, block, 2 * block, LONG // 2, LONG - block - 1, LONG - block, LONG - 1]
    assert_rows(out, lse, batch.inputs, rows)
    short = batch.inputs | {
        "q": batch.inputs["q"][LONG:],
        **{name: batch.inputs[name][1:] for name in ("q_lens", "kv_lens", "block_tables")},
    }
    assert_attention(out[LONG:], lse[LONG:], short)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([8192, 16384, 24576, LONG], id="four of 8192"),
        pytest.param([10007, 10784, LONG], id="three, within pages and blocks"),
    ],
)
def test_a_long_prompt_in_chunks_has_the_bits_of_one_step(ends):
    """What is computed when, on which rank, behind which prefix, changes no row."""
    batch, whole, whole_lse = long_batch(1, "zigzag")
    q = batch.inputs["q"].flatten(1)
    options = {"block_tables": batch.inputs["block_tables"][:1], "return_lse": True}
    for begin, end in pairwise([0, *ends]):
        ranks = cpattn.build_cp_metadata_all_ranks([end - begin], [end], cp_size=4)
        chunk = q[begin:end].contiguous()
        parts = [batch.run(rank, rank.shard(chunk), **options) for rank in ranks]
        out, lse = (ranks[0].unshard(list(part)) for part in zip(*parts, strict=True))
        assert torch.equal(out[:, None], whole[begin:end])
        assert torch.equal(lse, whole_lse[begin:end])


# --- drafts that are verified: four rows each, of a sequence of two tokens and one of nine --------

DRAFTS, SEQ_LENS = 4, (2, 9)
SEES = [0, 0, 1, 2, 6, 7, 8, 9]  # keys of each row: row ends are -1, 0, 1, 2 and 6 to 9


def test_drafts_before_the_first_key_see_nothing(isa):
    inputs = make_inputs(Case(q_lens=(DRAFTS,) * 2, kv_lens=SEQ_LENS))
    out, lse = cpattn.paged_attention(**inputs, return_lse=True)
    assert_attention(out, lse, inputs)
    assert torch.isneginf(lse).all(1).tolist() == [sees == 0 for sees in SEES]
    with pytest.raises(ValueError, match="allow_short_kv=True lets the first queries see nothing"):
        cpattn.paged_attention(**inputs | {"allow_short_kv": False})


@pytest.mark.parametrize("topk", [4, 8])
def test_drafts_choose_among_the_keys_before_them(isa, topk):
    """From lengths to the indexer, the chosen keys and attention to them."""
    metadata = cpattn.sparse.build_dsa_metadata(
        None, SEQ_LENS, forward_mode=cpattn.ForwardMode.TARGET_VERIFY, topk=topk,
        num_draft_tokens=DRAFTS, fp8_kv_cache=True, prefill_impl="flashmla_sparse",
    )  # fmt: skip
    assert np.maximum(metadata.seqlens_expanded, 0).tolist() == SEES
    starts = np.repeat([0, SEQ_LENS[0]], DRAFTS)
    index = make_index_inputs(len(SEES), sum(SEQ_LENS)) | {"ks": starts, "ke": starts + SEES}
    chosen = np.asarray(cpattn.sparse.indexer_topk(**index, topk=topk))
    np.testing.assert_array_equal(
        chosen, best_keys(cpattn.sparse.indexer_logits(**index), index, topk, True)
    )
    assert (chosen >= 0).sum(1).tolist() == np.minimum(SEES, topk).tolist()

    generator = torch.Generator().manual_seed(0)
    inputs = {
        "q": torch.randn(len(SEES), 2, 64, generator=generator),
        "kv": torch.randn(sum(SEQ_LENS), 1, 64, generator=generator),
        "indices": torch.from_numpy(np.where(chosen >= 0, chosen + starts[:, None], -1))[:, None],
        "sm_scale": 0.125,
        "d_v": 32,
    }
    result = cpattn.sparse.flash_mla_sparse_fwd(**inputs)
    sparse_mla_cases.assert_result(result, inputs)
    assert not result[0][:2].any()
    assert torch.isneginf(result[2][:2]).all()
