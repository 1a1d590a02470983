# SPDX-License-Identifier: Apache-2.0
"""merge_state and merge_states agree with the oracle and each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn import reference
from support.cases import DTYPES, strided_copy
from support.tolerances import assert_close

INF = math.inf


def make_parts(num_parts, shape=(7, 3, 80), dtype="float32", seed=0, empty=0.0):
    """Return outputs and LSE; the share `empty` has LSE -inf and output NaN."""
    generator = torch.Generator().manual_seed(seed)
    outs, lses = [], []
    for _ in range(num_parts):
        out = torch.randn(shape, generator=generator)
        lse = 5 * torch.randn(shape[:2], generator=generator)
        without_keys = torch.rand(shape[:2], generator=generator) < empty
        out[without_keys], lse[without_keys] = torch.nan, -INF
        outs.append(strided_copy(out.to(getattr(torch, dtype))))
        lses.append(strided_copy(lse))
    return outs, lses


def two_parts(dtype, shape=(7, 3, 80)):
    """Return the arguments of merge_state."""
    outs, lses = make_parts(2, shape, dtype)
    return [outs[0], lses[0], outs[1], lses[1]]


def assert_merged(result, parts, dtype):
    """Compare with the oracle; `parts` are copies from before the call."""
    expected_out, expected_lse = reference.merge_state(*parts)
    magnitude, _ = reference.merge_state(parts[0].abs(), parts[1], parts[2].abs(), parts[3])
    assert_close(result[0], expected_out, magnitude, "merge_state", dtype)
    size = np.maximum(1, np.abs(np.nan_to_num(expected_lse, neginf=0)))
    assert_close(result[1], expected_lse, size, "merge_state lse", "any")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 3, 80), (1, 1, 1), (2, 5, 17), (0, 4, 64), (3, 2, 576)])
def test_two_parts_against_the_oracle(isa, shape, dtype):
    parts = two_parts(dtype, shape)
    before = [part.clone() for part in parts]
    result = cpattn.merge_state(*parts)
    assert result[0] is parts[0]
    assert result[1] is parts[1]
    assert_merged(result, before, dtype)
    assert torch.equal(parts[2], before[2])
    assert torch.equal(parts[3], before[3])


def stacked(outs, lses):
    return torch.stack(outs, 1), torch.stack(lses, 1)


def by_pairs(outs, lses, sinks=None):
    """Merge two parts at a time in float32, and round once."""
    out, lse = outs[0].float().clone(), lses[0].clone()
    out[lse == -INF] = 0
    for other, other_lse in zip(outs[1:], lses[1:], strict=True):
        cpattn.merge_state(out, lse, other.float().contiguous(), other_lse)
    if sinks is not None:
        scores = torch.where(sinks == INF, -INF, sinks).expand_as(lse).contiguous()
        cpattn.merge_state(out, lse.clone(), torch.zeros_like(out), scores)
        out[:, sinks == INF] = 0
    return out.to(outs[0].dtype), lse


@given(
    num_parts=st.integers(1, 6),
    shape=st.tuples(st.integers(0, 5), st.integers(1, 20), st.sampled_from([1, 16, 48, 100, 192])),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(cpattn.supported_isas()),
    seed=st.integers(0, 99),
    empty=st.sampled_from([0.0, 0.4, 1.0]),
    sinks=st.none() | st.sampled_from([0.5, -1e4, INF, -INF]),
    order=st.randoms(use_true_random=False),
)
def test_bits_are_those_of_pairs_in_any_order(
    num_parts, shape, dtype, isa, seed, empty, sinks, order
):
    parts = list(zip(*make_parts(num_parts, shape, dtype, seed, empty), strict=True))
    order.shuffle(parts)
    outs, lses = [list(part) for part in zip(*parts, strict=True)]
    logits = None
    if sinks is not None:
        logits = torch.randn(shape[1], generator=torch.Generator().manual_seed(seed))
        logits[::2] = sinks
    before = cpattn.active_isa()
    cpattn._core.set_isa(isa)
    try:
        wanted = by_pairs(outs, lses, logits)
        results = [
            cpattn.merge_states(outs, lses, sinks=logits),
            cpattn.merge_states(*stacked(outs, lses), sinks=logits),
            cpattn.merge_states(tuple(outs), lses, sinks=logits, out=outs[0], lse=lses[0]),
        ]
    finally:
        cpattn._core.set_isa(before)
    assert results[2][0] is outs[0]
    assert results[2][1] is lses[0]
    for result in results:
        assert all(map(torch.equal, result, wanted))


F32 = torch.zeros(2, 3, 4)
LSE = torch.zeros(2, 3)
WITH_INF = torch.tensor([[0, 0, 0], [0, INF, 0.0]])
BUFFER = torch.zeros(3, 3, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], []), ValueError, "outs must have at least one part, got 0"),
        (([F32], [LSE, LSE]), ValueError, "lses must have 1 parts, as outs have, got 2"),
        (([F32], LSE), TypeError, "lses must be a list or tuple of tensors, got Tensor"),
        ((F32[:, None], [LSE]), TypeError, "lses must be a tensor"),
        (([F32, "x"], [LSE, LSE]), TypeError, r"outs\[1\] must be a tensor"),
        (([F32, F32[:1]], [LSE] * 2), ValueError, r"outs\[1\] must have shape \[2, 3, 4\], got"),
        (([F32, F32[..., None]], [LSE] * 2), ValueError, r"outs\[1\] must have 3 dimensions"),
        (([F32, F32.half()], [LSE] * 2), ValueError, r"outs\[1\] must be float32, got float16"),
        (([F32, F32.repeat(1, 1, 2)[..., ::2]], [LSE] * 2), ValueError, r"outs\[1\] must be conti"),
        (([F32.double()], [LSE]), ValueError, r"outs\[0\] must be float32, float16"),
        (([F32], [LSE.half()]), ValueError, r"lses\[0\] must be float32, got float16"),
        (([F32] * 2, [LSE, LSE[:1]]), ValueError, r"lses\[1\] must have shape \[2, 3\], got \[1"),
        (([F32] * 2, [LSE, WITH_INF]), ValueError, r"lses\[1\] must not .*got \+inf at \[1, 1\]"),
        (
            (F32[:, None].repeat(1, 2, 1, 1), torch.stack([LSE, WITH_INF], 1)),
            ValueError,
            r"lses\[:, 1\] must not be \+inf .*got \+inf at \[1, 1\]",
        ),
        ((F32[:, :0, None], LSE[:, :0, None]), ValueError, "outs must have at least one part"),
        ((F32[:, None], LSE), ValueError, r"lses must have shape \[2, 1, 3\], got \[2, 3\]"),
        ((F32, LSE), ValueError, r"outs must have 4 dimensions, got shape \[2, 3, 4\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("given_results", [False, True])
def test_errors_name_argument_rule_and_value(arguments, error, message, given_results):
    results = {"out": torch.full((2, 3, 4), 7.0), "lse": torch.full((2, 3), 7.0)}
    with pytest.raises(error, match=f"^merge_states: {message}"):
        cpattn.merge_states(*arguments, **(results if given_results else {}))
    assert all(torch.all(x == 7) for x in results.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \[3\], got \[2\]"),
        ({"sinks": torch.zeros(3).double()}, "sinks must be float32, got float64"),
        ({"out": F32.clone()[:1]}, r"out must have shape \[2, 3, 4\], got \[1, 3, 4\]"),
        ({"out": F32.half()}, "out must be float32, got float16"),
        ({"lse": LSE.clone()[:, :2]}, r"lse must have shape \[2, 3\], got \[2, 2\]"),
        ({"out": BUFFER[1:]}, r"out must not overlap outs\[0\] in memory"),
        ({"out": F32}, r"out must not overlap outs\[1\] in memory"),
        ({"lse": LSE}, r"lse must not overlap lses\[1\] in memory"),
        ({"lse": BUFFER[2, :2, :3]}, "lse must not overlap sinks in memory"),
        ({"out": F32.clone().expand(2, 3, 4)[:, :, :0]}, "out must have shape"),
    ],
)
def test_options_are_checked(options, message):
    arguments = {"sinks": BUFFER[2, 0, :3]} | options
    with pytest.raises(ValueError, match=f"^merge_states: {message}"):
        cpattn.merge_states([BUFFER[:2], F32], [LSE.clone(), LSE], **arguments)
    assert not BUFFER.any()
    assert not F32.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.zeros(2, 3, 5)}, r"out_b must have shape \[2, 3, 4\], got \[2, 3, 5\]"),
        ({3: torch.zeros(2, 2)}, r"lse_b must have shape \[2, 3\], got \[2, 2\]"),
        ({3: torch.tensor([[0, 0, 0], [0, INF, 0.0]])}, r"lse_b must not .*got \+inf at \[1, 1\]"),
        ({2: torch.zeros(2, 3, 8)[..., ::2]}, "out_b must be .*its last dimension, got stride 2"),
        ({0: BUFFER[:2], 2: BUFFER[1:]}, "out_a must not overlap out_b in memory"),
        ({1: LSE, 3: LSE}, "lse_a must not overlap lse_b in memory"),
    ],
)
def test_errors_of_two_parts(change, message):
    parts = [torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3, 4), torch.zeros(2, 3)]
    for index, value in change.items():
        parts[index] = value
    with pytest.raises(ValueError, match=f"^merge_state: {message}"):
        cpattn.merge_state(*parts)


def test_the_first_part_may_have_other_strides_of_one_token():
    parts = np.ones((2, 3, 4), np.float32)
    lses = np.zeros((2, 1, 3), np.float32)
    first = parts[:1]  # the stride of its one token is that of a part
    own = np.lib.stride_tricks.as_strided(first, first.shape, (4, 16, 4))
    out, _ = cpattn.merge_states([first, 3 * first], list(lses), out=own)
    assert out is own
    assert (parts[0] == 2).all()
