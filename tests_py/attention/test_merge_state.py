# SPDX-License-Identifier: Apache-2.0
"""merge_state against the oracle and against attention over the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import cpattn
from cpattn import reference
from support.cases import DTYPES, strided_copy
from support.tolerances import assert_close

INF = math.inf


def make_parts(dtype, shape=(7, 3, 80), seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _ in "ab"]
    lses = [5 * torch.randn(shape[:2], generator=generator) for _ in "ab"]
    return [strided_copy(x) for x in (outs[0], lses[0], outs[1], lses[1])]


def assert_merged(result, parts, dtype):
    """`parts` as they were before the call."""
    expected_out, expected_lse = reference.merge_state(*parts)
    magnitude, _ = reference.merge_state(parts[0].abs(), parts[1], parts[2].abs(), parts[3])
    assert_close(result[0], expected_out, magnitude, "merge_state", dtype)
    size = np.maximum(1, np.abs(np.nan_to_num(expected_lse, neginf=0)))
    assert_close(result[1], expected_lse, size, "merge_state lse", "any")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 3, 80), (1, 1, 1), (2, 5, 17), (0, 4, 64), (3, 2, 576)])
def test_against_the_oracle(isa, shape, dtype):
    parts = make_parts(dtype, shape)
    before = [part.clone() for part in parts]
    result = cpattn.merge_state(*parts)
    assert result[0] is parts[0]
    assert result[1] is parts[1]
    assert_merged(result, before, dtype)
    assert torch.equal(parts[2], before[2])
    assert torch.equal(parts[3], before[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_without_keys_is_ignored_whatever_it_holds(isa, dtype):
    parts = make_parts(dtype)
    parts[0][1], parts[1][1] = torch.nan, -INF
    parts[2][2], parts[3][2] = torch.nan, -INF
    parts[0][3], parts[1][3], parts[2][3], parts[3][3] = torch.nan, -INF, torch.nan, -INF
    before = [part.clone() for part in parts]
    out, lse = cpattn.merge_state(*parts)
    assert_merged((out, lse), before, dtype)
    assert torch.equal(out[1], before[2][1])
    assert torch.equal(out[2], before[0][2])
    assert torch.all(out[3] == 0)
    assert torch.all(lse[3] == -INF)


def test_large_differences_do_not_overflow():
    parts = make_parts("float32")
    parts[1] += 1e4
    parts[3] -= 1e4
    before = [part.clone() for part in parts]
    result = cpattn.merge_state(*parts)
    assert all(map(torch.equal, result, before))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.zeros(2, 3, 5)}, r"out_b must have shape \[2, 3, 4\], got \[2, 3, 5\]"),
        ({3: torch.zeros(2, 2)}, r"lse_b must have shape \[2, 3\], got \[2, 2\]"),
        ({3: torch.tensor([[0, 0, 0], [0, INF, 0.0]])}, r"lse_b must not .*got \+inf at \[1, 1\]"),
        ({2: torch.zeros(2, 3, 8)[..., ::2]}, "out_b must be .*its last dimension, got stride 2"),
    ],
)
def test_errors_name_argument_rule_and_value(change, message):
    parts = [torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3, 4), torch.zeros(2, 3)]
    for index, value in change.items():
        parts[index] = value
    with pytest.raises(ValueError, match=f"^merge_state: {message}"):
        cpattn.merge_state(*parts)


def test_overlapping_parts_are_refused():
    buffer, lse = torch.zeros(3, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="merge_state: out_a must not overlap out_b in memory"):
        cpattn.merge_state(buffer[:2], lse, buffer[1:], lse.clone())
    with pytest.raises(ValueError, match="merge_state: lse_a must not overlap lse_b in memory"):
        cpattn.merge_state(buffer[:2], lse, torch.ones(2, 3, 4), lse)
