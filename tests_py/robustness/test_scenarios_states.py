# SPDX-License-Identifier: Apache-2.0
"""Buffers that are used again, and partial results that meet."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import cpattn
from cpattn.integrations import flash_attn, flashinfer
from support.attention_cases import plan_of, split_keys
from support.cases import Case, assert_attention, expected_attention, make_inputs

# --- a small batch in the buffers of a large one ------------------------------------------------

LARGE = Case(q_lens=(40, 1, 30, 9), kv_lens=(130, 90, 30, 64), dtype="bfloat16")
SMALL = Case(q_lens=(3, 1), kv_lens=(20, 35), dtype="bfloat16")


class Buffers:
    """What an engine allocates once, for its largest batch, and views of it for each."""

    def __init__(self):
        self.q = torch.full((128, 4, 64), torch.nan, dtype=torch.bfloat16)
        self.out, self.lse = torch.full_like(self.q, 7.0), torch.full((128, 4), 7.0)
        self.tables = np.full((8, 16), 1 << 30, np.int32)
        self.q_lens, self.kv_lens = np.zeros(8, np.int32), np.zeros(8, np.int32)

    def place(self, case, inputs):
        rows, batch = sum(case.q_lens), len(case.q_lens)
        width = inputs["block_tables"].shape[1]
        self.q[:rows] = inputs["q"]
        self.tables[:batch, :width] = inputs["block_tables"]
        self.q_lens[:batch], self.kv_lens[:batch] = case.q_lens, case.kv_lens
        return inputs | {
            "q": self.q[:rows],
            "q_lens": self.q_lens[:batch],
            "kv_lens": self.kv_lens[:batch],
            "block_tables": self.tables[:batch],
            "out": self.out[:rows],
            "lse": self.lse[:rows],
            "return_lse": True,
        }


def test_a_small_batch_in_the_buffers_of_a_large_one(isa):
    """Nothing of the large batch is seen, and nothing behind the small one is written."""
    buffers, large, small = Buffers(), make_inputs(LARGE), make_inputs(SMALL, seed=1)
    for case, inputs in ((LARGE, large), (SMALL, small), (LARGE, large), (SMALL, small)):
        before = buffers.out.clone(), buffers.lse.clone()
        out, lse = cpattn.paged_attention(**buffers.place(case, inputs))
        assert_attention(out, lse, inputs)
        fresh = cpattn.paged_attention(**inputs, return_lse=True)
        assert torch.equal(out, fresh[0])
        assert torch.equal(lse, fresh[1])
        rows = sum(case.q_lens)
        assert torch.equal(buffers.out[rows:], before[0][rows:])
        assert torch.equal(buffers.lse[rows:], before[1][rows:])


def test_plans_keep_what_they_were_made_of_when_buffers_are_used_again(isa):
    """Tables and lengths of the small batch replace those of the large one, whose plan runs on."""
    buffers, large, small = Buffers(), make_inputs(LARGE), make_inputs(SMALL, seed=1)
    pairs = ((LARGE, large), (SMALL, small))
    plans = [plan_of(buffers.place(case, inputs)) for case, inputs in pairs]
    buffers.tables[:], buffers.q_lens[:], buffers.kv_lens[:] = 1 << 30, -1, -1
    for plan, inputs in zip(plans, (large, small), strict=True):
        tensors = (inputs[name] for name in ("q", "k_cache", "v_cache"))
        assert_attention(*cpattn.run_attention(plan, *tensors, return_lse=True), inputs)


# --- states of others ---------------------------------------------------------------------------


def whole_and_parts(dtype="float32"):
    """Four shards of the keys of one sequence."""
    inputs = make_inputs(Case(q_lens=(3,), kv_lens=(256,), dtype=dtype))
    return inputs | {"causal": False}, list(split_keys(inputs, [0, 3, 4, 9, 16]))


def test_a_shard_without_keys_as_flash_attn_marks_it():
    """flash-attn gives +inf there: refused as it is, and merged when it is made -inf."""
    inputs, parts = whole_and_parts()
    q = inputs["q"][None]
    nothing = torch.zeros(1, 0, 2, 64)
    out, lse, _ = flash_attn.flash_attn_func(q, nothing, nothing, return_attn_probs=True)
    out, lse = out[0], lse[0].T.contiguous()
    assert not out.any()
    assert torch.all(lse == math.inf)
    merged = [part.clone() for part in parts[0]]
    with pytest.raises(ValueError, match=r"lse_b must not be \+inf"):
        cpattn.merge_state(*merged, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(merged, parts[0], strict=True))
    for part in [(out, lse.masked_fill(lse == math.inf, -math.inf)), *parts[1:]]:
        cpattn.merge_state(*merged, *part)
    assert_attention(*merged, inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_of_two_libraries_with_lses_to_different_bases(dtype):
    """FlashInfer counts to base 2. Converted, all merge; taken as it is, the result is far off."""
    inputs, parts = whole_and_parts(dtype)
    expected = expected_attention(inputs)
    to_base_2 = [(out, lse / math.log(2)) for out, lse in parts]
    op = "attention" if dtype == "float32" else "8 parts merged"
    v, s = flashinfer.merge_states(*(torch.stack(x, 1) for x in zip(*to_base_2, strict=True)))
    assert_attention(v, s * math.log(2), inputs, op, expected)

    def merge(parts):
        out, lse = (x.clone() for x in parts[0])
        for part in parts[1:]:
            cpattn.merge_state(out, lse, *part)
        return out, lse

    mixed = [to_base_2[i] if i % 2 else part for i, part in enumerate(parts)]
    back = [(out, lse * math.log(2)) if i % 2 else (out, lse) for i, (out, lse) in enumerate(mixed)]
    assert_attention(*merge(back), inputs, op, expected)
    with pytest.raises(AssertionError, match="times what is allowed"):
        assert_attention(*merge(mixed), inputs, op, expected)
