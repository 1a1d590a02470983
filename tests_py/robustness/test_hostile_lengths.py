# SPDX-License-Identifier: Apache-2.0
"""Sizes, offsets and shapes far outside a batch are refused before they are used."""

import numpy as np
import pytest
import torch

import cpattn

HUGE = 2**63 - 1


def one_page(**changes):
    """Return arguments of paged_attention for a token on one page, in float32."""
    cache = torch.ones(1, 16, 1, 16)
    batch = {"q_lens": [1], "kv_lens": [5], "block_tables": [[0]]}
    return {"q": torch.ones(1, 1, 16), "k_cache": cache, "v_cache": cache, **batch, **changes}


def test_rows_are_counted_before_they_are_planned():
    inputs = one_page(
        q_lens=[2**31 - 1], kv_lens=[2**31 - 1], block_tables=np.zeros((1, 2**20), int)
    )
    with pytest.raises(ValueError, match=r"sum\(q_lens\) = 2147483647, got 1"):
        cpattn.paged_attention(**inputs)


def test_more_queries_than_keys_have_to_be_meant():
    inputs = one_page(q=torch.ones(7, 1, 16), q_lens=[7])
    message = "kv_lens must count the new tokens too, .* got kv_len 5 for q_len 7 at index 0"
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        cpattn.paged_attention(**inputs)
    out, lse = cpattn.paged_attention(**inputs, allow_short_kv=True, return_lse=True)
    assert out[:, 0, 0].tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert torch.isneginf(lse).ravel().tolist() == [True] * 2 + [False] * 5
    assert torch.all(cpattn.paged_attention(**inputs, causal=False) == 1)
    sizes = {"page_size": 16, "num_pages": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    with pytest.raises(ValueError, match=f"plan_attention: {message}"):
        cpattn.plan_attention(q_lens=[7], kv_lens=[5], block_tables=[[0]], **sizes)


# The caches have 64 pages of 16 tokens, and 2 KV heads of 64.
@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        *[((64, 16, 2, 64), True), ((64, 16, 128), True), ((1024, 2, 64), True)],
        *[((1024, 128), True), ((64, 16 * 128), True), ((64 * 16 * 128,), True)],
        *[((64, 1, 16, 2, 64), True), ((64, 2, 16, 64), False), ((128, 8, 2, 64), False)],
        *[((64, 16, 1, 128), True), ((64, 16, 4, 32), False), ((32, 32, 2, 64), False)],
    ],
)
def test_a_cache_may_not_contradict_the_sizes(shape, fits):
    cache = torch.randn(64 * 16 * 2 * 64, generator=torch.Generator().manual_seed(0))
    metadata = cpattn.build_cp_metadata([20], cp_rank=0, cp_size=2)

    def attend(k_cache):
        return cpattn.do_cp_attn_fia(
            torch.ones(10, 4 * 64), k_cache, cache.view(64, 16, 2, 64), metadata,
            block_tables=[[3, 5]], page_size=16, num_heads=4, num_kv_heads=2, scale=0.1,
        )  # fmt: skip

    if fits:
        assert torch.equal(attend(cache.view(shape)), attend(cache.view(64, 16, 2, 64)))
        return
    with pytest.raises(ValueError, match=r"k_cache must be \[num_pages, page_size, num_kv_heads,"):
        attend(cache.view(shape))


def test_fia_without_dimensions_has_no_result():
    q, value = torch.ones(1, 3, 2, 0), torch.ones(1, 3, 2, 16)
    with pytest.raises(ValueError, match=r"head dimension of key must be in \[1, 576\], got 0"):
        cpattn.npu.npu_fused_infer_attention_score(q, q, value, num_heads=2, input_layout="BSND")


def test_ranks_whose_sum_overflows():
    with pytest.raises(ValueError, match="must fit into int32, got 9223372036854775807, 1 and 1"):
        cpattn.sparse.split_qk_norm(
            torch.ones(1, 3), torch.ones(1), torch.ones(1), HUGE, 1, 1, q_eps=1e-6, kv_eps=1e-6
        )
