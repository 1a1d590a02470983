# SPDX-License-Identifier: Apache-2.0
"""The functions of flash-attn on keys and values that are codes of 8 bits, against the oracle."""

from __future__ import annotations

import pytest
import torch

from cpattn.integrations import flash_attn
from support.integrations import flash_attn_cases as cases
from support.integrations.flash_attn_cases import DIM, HEADS, KV_HEADS, normal
from support.tolerances import assert_similar


@pytest.fixture(autouse=True)
def fixed_inputs():
    torch.manual_seed(0)


DESCALES = {
    "number": 0.02,
    "one": torch.tensor([0.02]),
    "heads": torch.tensor([0.02, 0.03]),
    "the same in all sequences": torch.tensor([[0.02, 0.03]]).expand(3, 2),
    "of sequences": torch.tensor([[0.02, 0.03], [0.01, 0.04], [0.05, 0.02]]),
}


def coded(*shape, dtype=torch.int8):
    return torch.randint(-90, 90, shape).to(dtype)


def by_sequence(descale, lengths):
    """What each row of keys is multiplied with: [rows, kv_heads or 1, 1]."""
    descale = torch.as_tensor(descale).double()
    descale = descale.reshape(1) if descale.ndim == 0 else descale
    heads = descale if descale.ndim == 2 else descale.expand(len(lengths), -1)
    return heads.repeat_interleave(torch.tensor(lengths), 0)[..., None]


@pytest.mark.parametrize("kind", DESCALES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_ragged_codes(dtype, kind):
    q_lens, kv_lens, descale = [5, 2, 3], [9, 12, 3], DESCALES[kind]
    q = normal(10, HEADS, DIM)
    k, v = coded(24, KV_HEADS, DIM, dtype=dtype), coded(24, KV_HEADS, DIM, dtype=dtype)
    options = {"causal": True, "k_descale": descale, "v_descale": descale}
    out, lse = cases.run_varlen(q, k, v, q_lens, kv_lens, **options)
    factor = by_sequence(descale, kv_lens)
    meant = cases.oracle_inputs(q, k.double() * factor, v.double() * factor, q_lens, kv_lens, True)
    cases.assert_result(out, lse, meant)


@pytest.mark.parametrize("kind", DESCALES)
def test_codes_of_equal_lengths(kind):
    q, k, v = normal(3, 4, HEADS, DIM), *coded(2, 3, 6, KV_HEADS, DIM)
    descale = DESCALES[kind]
    options = {"causal": True, "k_descale": descale, "v_descale": descale}
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    factor = by_sequence(descale, [6] * 3)
    k, v = (x.flatten(0, 1).double() * factor for x in (k, v))
    meant = cases.oracle_inputs(q.flatten(0, 1), k, v, [4] * 3, [6] * 3, True)
    cases.assert_result(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), meant)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_appended_to_a_cache_of_codes(dtype):
    q, (k_cache, v_cache) = normal(2, 1, HEADS, DIM), coded(2, 2, 8, KV_HEADS, DIM, dtype=dtype)
    k, v = coded(2, 2, 1, KV_HEADS, DIM, dtype=dtype)
    options = {"k_descale": 0.02, "v_descale": torch.tensor([0.01, 0.03]), "causal": True}
    caches, lens = (q, k_cache, v_cache), torch.tensor([3, 7])
    out = flash_attn.flash_attn_with_kvcache(*caches, k, v, cache_seqlens=lens, **options)
    for sequence, length in enumerate((4, 8)):
        assert torch.equal(k_cache[sequence, length - 1].float(), k[sequence, 0].float())
        expected = flash_attn.flash_attn_func(
            q[sequence][None], *(x[sequence, :length][None] for x in (k_cache, v_cache)), **options
        )
        assert_similar(out[sequence], expected[0])
    with pytest.raises(ValueError, match="k must be codes like those of the cache"):
        flash_attn.flash_attn_with_kvcache(*caches, k.float(), v, cache_seqlens=3, **options)


def test_descales_that_do_not_fit():
    q, k, v = normal(2, 4, HEADS, DIM), *coded(2, 2, 6, KV_HEADS, DIM)
    with pytest.raises(ValueError, match=r"v_descale must be \[batch, kv_heads\] = \[2, 2\], got"):
        flash_attn.flash_attn_func(q, k, v, v_descale=torch.ones(2, 4))
    with pytest.raises(ValueError, match="k_scale must be a positive number, got 0"):
        flash_attn.flash_attn_func(q, k, v, k_descale=0.0)
