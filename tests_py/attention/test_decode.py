# SPDX-License-Identifier: Apache-2.0
"""Few new tokens behind many keys: keys are read in place, and split parts are merged."""

import functools

import numpy as np
import pytest
import torch

from support.attention_cases import plan_of, run
from support.cases import DTYPES, Case, assert_attention, expected_attention, make_inputs

pytestmark = pytest.mark.slow


# The sequences have three parts of up to 512 keys, one, and none.
LONG = Case(q_lens=(1, 3, 0), kv_lens=(1200, 70, 5), num_heads=8, num_kv_heads=2, page_size=64)
CASES = [
    LONG,
    LONG.with_(kv_layout="HND", page_size=100),
    LONG.with_(kv_layout="3-D", page_size=1),
    LONG.with_(num_heads=6, num_kv_heads=6, head_dim=80, v_head_dim=48),
    LONG.with_(num_heads=40, num_kv_heads=8, head_dim=192, v_head_dim=128),  # two runs of heads
    LONG.with_(num_heads=7, num_kv_heads=1, head_dim=112),
    LONG.with_(q_lens=(16, 2, 4), num_heads=9, num_kv_heads=3),  # 48 rows: packed and split
    LONG.with_(num_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, options={"scale": 0.1}),
    LONG.with_(num_heads=6, num_kv_heads=1, head_dim=576, v_head_dim=512, options={"scale": 0.1}),
    LONG.with_(num_heads=64, num_kv_heads=1),
    LONG.with_(options={"window": 600}),  # two of three parts are visible
    LONG.with_(q_lens=(9, 1, 1), options={"window": 520, "softcap": 5.0}),
    LONG.with_(options={"causal": False, "sinks": torch.linspace(-3, 9, 8)}),
    LONG.with_(q_lens=(3, 9, 2), kv_lens=(1026, 4, 0)),  # the last part has two keys; empty rows
]


@functools.cache
def inputs_and_expected(index, dtype):
    """Make inputs and results once for all instruction sets."""
    inputs = make_inputs(CASES[index].with_(dtype=dtype))
    return inputs, expected_attention(inputs)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_against_the_oracle(isa, index):
    for dtype in DTYPES:
        inputs, expected = inputs_and_expected(index, dtype)
        assert_attention(*run(inputs), inputs, expected=expected)


def test_custom_masks_across_parts(isa):
    inputs = make_inputs(LONG.with_(q_lens=(4, 1, 0), dtype="bfloat16"))
    mask = np.random.default_rng(1).random(4 * 1200 + 70) < 0.5
    mask[1200:2400] = False
    mask[1200 + 777] = True  # one key in the middle part
    mask[2400:3600] = False  # a row that sees nothing
    inputs["custom_mask"] = mask
    assert_attention(*run(inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_are_read_together_have_the_bits_of_each_alone(isa, dtype):
    """An item of a large batch has several KV heads, an item of a single sequence has one."""
    kv_lens = tuple(33 + 5 * i for i in range(48))
    case = Case(
        q_lens=(1, 2, 3) * 16, kv_lens=kv_lens, num_heads=8, num_kv_heads=4, dtype=dtype,
        options={"softcap": 20.0, "sinks": torch.linspace(-2, 2, 8)},
    )  # fmt: skip
    inputs = make_inputs(case) | {"batch_invariant": True}
    assert np.all(plan_of(inputs, batch_invariant=True).items[:, 4] == 4)
    out, lse = run(inputs)
    row = 0
    for i, (q_len, kv_len) in enumerate(zip(case.q_lens, kv_lens, strict=True)):
        rows = slice(row, row + q_len)
        alone = inputs | {
            "q": inputs["q"][rows], "q_lens": [q_len], "kv_lens": [kv_len],
            "block_tables": inputs["block_tables"][i : i + 1],
        }  # fmt: skip
        assert all(map(torch.equal, run(alone), (out[rows], lse[rows])))
        row += q_len


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_pages(isa, dtype):
    """Keys are loaded in place, or first copied together."""
    case = Case(
        q_lens=(3, 1), kv_lens=(701, 45), num_heads=8, num_kv_heads=2, page_size=16, dtype=dtype,
        options={"window": 600},
    )  # fmt: skip
    inputs = make_inputs(case)
    whole = run(inputs)
    for page_size in (1, 8):
        parts = 16 // page_size
        tables = inputs["block_tables"][:, :, None] * parts + np.arange(parts)
        caches = {
            name: inputs[name].reshape(-1, page_size, *inputs[name].shape[2:])
            for name in ("k_cache", "v_cache")
        }
        small = inputs | caches | {"page_size": page_size, "block_tables": tables.reshape(2, -1)}
        assert all(map(torch.equal, run(small), whole))
