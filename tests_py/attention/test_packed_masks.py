# SPDX-License-Identifier: Apache-2.0
"""Masks given as bits: what bools give, and which ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cpattn
from support.attention_cases import plan_of
from support.cases import Case, dense, make_inputs, packed

CASE = Case(q_lens=(5, 1, 0, 19, 33), kv_lens=(25, 4, 9, 52, 1100))


def random_masks(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.random(shape) < 0.4 for shape in zip(CASE.q_lens, CASE.kv_lens, strict=True)]


def inputs_of(case=CASE):
    """Make inputs without NaN in caches, as what a mask hides may be read."""
    inputs = make_inputs(case)
    return inputs | {name: inputs[name].nan_to_num() for name in ("k_cache", "v_cache")}


def test_bits_behind_the_last_one_of_a_sequence_do_not_matter():
    masks = random_masks(1)
    bits = packed(masks)
    unused = packed([np.zeros_like(mask) for mask in masks])
    end = 0
    for mask in masks:
        end += -(-mask.size // 8)
        if mask.size % 8:
            unused[end - 1] = 0xFF << mask.size % 8 & 0xFF
    assert unused.any()
    expected, result = (
        cpattn.paged_attention(**inputs_of(), packed_custom_mask=x) for x in (bits, bits | unused)
    )
    assert torch.equal(expected, result)


def test_a_plan_of_bits_is_that_of_bools():
    masks = random_masks(2)
    bools = plan_of(inputs_of(), custom_mask=dense(masks))
    bits = plan_of(inputs_of(), packed_custom_mask=packed(masks))
    assert bools == bits
    assert bits != plan_of(inputs_of())


SIZE = sum(q * kv for q, kv in zip(CASE.q_lens, CASE.kv_lens, strict=True))
BYTES = len(packed(random_masks(0)))


def bits_of(count, dtype=np.uint8, step=1):
    return {"packed_custom_mask": np.ones(count, dtype)[::step]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bits_of(BYTES + 1), rf"packed_custom_mask must .* = {BYTES} bytes, got {BYTES + 1}"),
        (bits_of(3), "packed_custom_mask .*more bytes, got 3"),
        (bits_of(BYTES, bool), "packed_custom_mask must .*uint8, got bool"),
        (bits_of(2 * BYTES, step=2), "packed_custom_mask must be contiguous"),
        (bits_of(BYTES) | {"custom_mask": np.ones(SIZE, bool)}, "give either .* got both"),
    ],
)
def test_value_errors(change, message):
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        cpattn.paged_attention(**inputs_of(), **change)
