# SPDX-License-Identifier: Apache-2.0
"""paged_attention agrees with the oracle in each instruction set, dtype, layout and option."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.attention_cases import ALL_CASES, DEFAULT, inputs_and_expected, run
from support.cases import DTYPES, Case, assert_attention, expected_attention, make_inputs
from support.examples import examples


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(ALL_CASES)), ids=lambda i: str(ALL_CASES[i])[:80])
def test_against_the_oracle(isa, index, dtype):
    inputs, expected = inputs_and_expected(index, dtype)
    for batch_invariant in (False, True):
        out, lse = run(inputs, batch_invariant=batch_invariant)
        assert out.dtype == inputs["q"].dtype
        assert lse.dtype == torch.float32
        assert_attention(out, lse, inputs, expected=expected)


def test_sequences_may_share_pages():
    inputs = make_inputs(DEFAULT.with_(q_lens=(4, 5), kv_lens=(48, 48)))
    inputs["block_tables"][1, :2] = inputs["block_tables"][0, :2]
    assert_attention(*run(inputs), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_custom_masks(isa, dtype, causal):
    case = DEFAULT.with_(q_lens=(5, 0, 3, 4), kv_lens=(37, 5, 70, 2), dtype=dtype)
    inputs = make_inputs(case) | {"causal": causal}
    rng = np.random.default_rng(3)
    mask = rng.random(sum(q * k for q, k in zip(case.q_lens, case.kv_lens, strict=True))) < 0.4
    mask[:37] = False  # the first query sees nothing
    inputs["custom_mask"] = mask
    expected = expected_attention(inputs)
    for batch_invariant in (False, True):
        assert_attention(*run(inputs, batch_invariant=batch_invariant), inputs, expected=expected)


def spoil(inputs, token, value):
    """Overwrite the key and the value of one token of the first sequence."""
    page, slot = inputs["block_tables"][0, token // 16], token % 16
    inputs["k_cache"][page, slot] = value
    inputs["v_cache"][page, slot] = value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_masks_and_biases_hide_never_matters(isa, dtype, value):
    case = DEFAULT.with_(q_lens=(20,), kv_lens=(50,), dtype=dtype)
    mask = np.ones((20, 50), bool)
    mask[:, 40] = False
    bias = np.where(mask, 0, -np.inf).astype(np.float32)
    for hidden in ({"custom_mask": mask.ravel()}, {"bias": bias[None, None]}):
        inputs = make_inputs(case) | hidden
        spoil(inputs, 40, value)
        assert_attention(*run(inputs), inputs)
    for q_len in (1, 3, 20):  # one head and the last row of another do not see the token
        of_heads = np.zeros((1, 4, q_len, 50), np.float32)
        of_heads[0, 0, :, 40] = of_heads[0, 1, -1, 40] = -np.inf
        some = make_inputs(case.with_(q_lens=(q_len,))) | {"bias": of_heads}
        spoil(some, 40, value)
        assert_attention(*run(some), some)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_a_bias_hides_change_no_bit(isa, dtype):
    """A row has equal bits if only a row nearby sees these blocks."""
    inputs = make_inputs(DEFAULT.with_(q_lens=(48,), kv_lens=(1100,), dtype=dtype))
    bias = np.full((1, 1, 48, 1100), -np.inf, np.float32)
    bias[..., 560:590] = 0
    inputs |= {"causal": False, "bias": bias}
    alone = run(inputs)
    assert_attention(*alone, inputs)
    near = bias.copy()
    near[:, :, ::6] = 0
    others = np.arange(48) % 6 > 0
    for x, same in zip(run(inputs | {"bias": near}), alone, strict=True):
        assert torch.equal(x[others], same[others])


@functools.cache
def hidden_by(number, kept):
    """Keys with the lower bias get no weight; if all keys have it, their weights are equal."""
    inputs = make_inputs(DEFAULT.with_(q_lens=(9,), kv_lens=(1100,))) | {"causal": False}
    bias = np.full((1, 1, 1, 1100), number, np.float32)
    bias[..., :kept] = 0 if number < 0 else -number
    shown = np.arange(1100) < kept if number < 0 and kept else np.arange(1100) >= kept
    same = inputs | {"custom_mask": np.tile(shown, 9)}
    if number > 0 or not kept:  # added to such a number, all scores are equal
        same |= {"q": torch.zeros_like(inputs["q"])}
    return inputs | {"bias": bias}, same, expected_attention(same)


@pytest.mark.parametrize("number", [-1e9, -1e12, -1e30, -3e38, 1e10, 1e30])
@pytest.mark.parametrize("kept", [0, 350])
def test_finite_numbers_may_hide_keys(isa, number, kept):
    inputs, same, expected = hidden_by(number, kept)
    for batch_invariant in (False, True):
        out, lse = run(inputs, batch_invariant=batch_invariant)
        assert_attention(out, None, same, expected=expected)
        assert torch.all(torch.isfinite(lse))
    one = make_inputs(DEFAULT.with_(q_lens=(1,), kv_lens=(1100,))) | {"bias": inputs["bias"]}
    assert torch.all(torch.isfinite(run(one)[0]))


@st.composite
def cases(draw):
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    batch = draw(st.integers(1, 4))
    options = {"causal": draw(st.booleans())}
    if options["causal"] and draw(st.booleans()):
        options["window"] = draw(st.integers(0, 100))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 20.0]))
    return Case(
        q_lens=tuple(draw(st.lists(st.integers(0, 40), min_size=batch, max_size=batch))),
        kv_lens=tuple(draw(st.lists(st.integers(0, 150), min_size=batch, max_size=batch))),
        num_heads=kv_heads * draw(st.sampled_from([1, 2, 5])),
        num_kv_heads=kv_heads,
        head_dim=16 * draw(st.integers(1, 6)),
        v_head_dim=16 * draw(st.integers(1, 6)),
        page_size=draw(st.sampled_from([1, 5, 16, 64, 100])),
        kv_layout=draw(st.sampled_from(["NHD", "HND", "3-D"])),
        dtype=draw(st.sampled_from(DTYPES)),
        options=options,
    )


# Scores whose rounding is as bad as the cap allows.
CAPPED = Case(
    q_lens=(0, 0, 0, 2),
    kv_lens=(0, 0, 2, 1),
    num_heads=2,
    head_dim=32,
    v_head_dim=16,
    page_size=5,
    dtype="float16",
    options={"causal": False, "softcap": 20.0},
)


@settings(max_examples=examples(60), deadline=None)
@given(case=cases(), seed=st.integers(0, 9))
@example(case=CAPPED, seed=0)
def test_ragged_batches(case, seed):
    inputs = make_inputs(case, seed)
    assert_attention(*run(inputs), inputs)
