# SPDX-License-Identifier: Apache-2.0
"""The FP8 cache of 656-byte rows is right, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from support.cases import DTYPES, strided_copy
from support.examples import examples
from support.sparse.sparse_mla_cases import expanded

GROUPS = (4, 128)


def make_parts(tokens, dtype="bfloat16", seed=0):
    """Make elements, and groups of them, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    nope = torch.randn(tokens, 512, generator=generator)
    nope *= torch.exp2(torch.randint(-9, 9, (tokens, 512), generator=generator))
    nope *= torch.exp2(torch.randint(-5, 3, (tokens, 4), generator=generator)).repeat_interleave(
        128, 1
    )
    rope = torch.randn(tokens, 64, generator=generator)
    return [strided_copy(x.to(getattr(torch, dtype))) for x in (nope, rope)]


def expected_rows(nope, rope):
    """Compute the definition in torch, for finite numbers that are not all zero."""
    groups = nope.float().unflatten(-1, GROUPS)
    scale = groups.abs().amax(-1) / 448
    codes = (groups * (1 / scale).unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    parts = codes.flatten(-2), scale, rope.to(torch.bfloat16)
    return torch.cat([part.view(torch.uint8) for part in parts], -1).unsqueeze(1)


def assert_same_numbers(actual, expected):
    """Compare bits; any NaN equals any other."""
    assert torch.equal(actual.isnan(), expected.isnan())
    bits = [x.nan_to_num(0).contiguous().view(torch.int16) for x in (actual, expected)]
    assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 33, 300])
def test_rows_are_those_of_the_definition(isa, tokens, dtype):
    nope, rope = make_parts(tokens, dtype)
    rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    assert rows.dtype == torch.uint8
    assert torch.equal(rows, expected_rows(nope, rope))
    codes, rope_bytes = cpattn.sparse.quantize_kv_rows_separate(
        nope.unsqueeze(1), rope.unsqueeze(1)
    )
    assert (codes.shape, rope_bytes.shape) == ((tokens, 1, 528), (tokens, 1, 128))
    assert torch.equal(torch.cat([codes, rope_bytes], -1), rows)
    numbers = cpattn.sparse.dequantize_kv_rows(rows)
    assert numbers.dtype == torch.bfloat16
    assert_same_numbers(numbers, expanded(rows))


def test_rounding_is_to_nearest_even_at_every_tie(isa):
    codes = np.arange(0x7E, dtype=np.uint8)
    below, above = (c.view(ml_dtypes.float8_e4m3fn).astype(np.float32) for c in (codes, codes + 1))
    ties = (below + above) / 2
    nope = np.zeros((3, 4, 128), np.float32)
    nope[..., 127] = 448  # the scale is then 1
    for row, direction in enumerate([0, 1, 1000]):
        nope[row, :, :126] = np.nextafter(ties, np.float32(direction)) if row != 1 else ties
    nope[:, 1::2] *= -1
    rows = cpattn.sparse.quantize_kv_rows(nope.reshape(3, 512), np.zeros((3, 64), np.float32))
    actual = rows[:, 0, :512].reshape(3, 4, 128)[..., :126] & 0x7F
    for row, expected in enumerate([codes, codes + codes % 2, codes + 1]):
        np.testing.assert_array_equal(actual[row], np.broadcast_to(expected, (4, 126)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_zeros_and_numbers_that_are_not_finite(isa, dtype):
    nope, rope = make_parts(5, dtype)
    nope[1, :128] = 0
    nope[1, 128:256] = -0.0
    nope[2, 200], nope[2, 300], nope[2, 511] = torch.nan, torch.inf, -torch.inf
    rope[3, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    normal = torch.tensor([0, 3, 4])
    assert_same_numbers(
        cpattn.sparse.dequantize_kv_rows(rows)[normal], expanded(expected_rows(nope, rope))[normal]
    )
    assert torch.all(rows[1, 0, :256] == 0)
    assert torch.all(rows[1, 0, 512:520] == 0)
    assert torch.all(rows[2, 0, 128:512] == 0x7F)
    numbers = cpattn.sparse.dequantize_kv_rows(rows)
    assert torch.all(numbers[1, 0, :256] == 0)
    assert torch.all(numbers[2, 0, 128:512].isnan())
    assert torch.equal(numbers[2, 0, :128], expanded(rows)[2, 0, :128])


def test_scales_below_the_normal_numbers_count_as_zero(isa):
    smallest = 2.0**-126
    nope = np.zeros((2, 512), np.float32)
    nope[0, :2] = [448 * smallest, -7 * smallest]
    nope[1, :2] = [447 * smallest, -7 * smallest]
    rows = cpattn.sparse.quantize_kv_rows(nope, np.zeros((2, 64), np.float32))
    assert rows[0, 0, 0] == 0x7E
    assert rows[0, 0, 512:516].view(np.float32) == smallest
    assert not rows[1].any()


@settings(max_examples=examples(30), deadline=None)
@given(data=st.data())
def test_rows_are_gathered_from_flat_and_paged_buffers(data):
    block = data.draw(st.integers(1, 5))
    blocks = data.draw(st.integers(1, 6))
    indices = data.draw(st.lists(st.integers(0, block * blocks - 1), max_size=20))
    rows = cpattn.sparse.quantize_kv_rows(*make_parts(block * blocks))
    whole = cpattn.sparse.dequantize_kv_rows(rows)
    paged = torch.empty(blocks, block + 1, 1, 700, dtype=torch.uint8)[:, 1:, :, 3:659]
    paged.copy_(rows.unflatten(0, (blocks, block)))
    for buffer in [rows, rows.squeeze(1), paged, paged.view(torch.float8_e4m3fn)]:
        assert torch.equal(cpattn.sparse.dequantize_kv_rows(buffer), whole)
        for given_as in (indices, torch.tensor(indices, dtype=torch.int32)):
            assert torch.equal(cpattn.sparse.dequantize_kv_rows(buffer, given_as), whole[indices])


X, ROWS = torch.zeros(2, 512), torch.zeros(2, 1, 656).byte()
OVER_X = X.view(torch.uint8)[:, None, :656]
QUANTIZE, DEQUANTIZE = cpattn.sparse.quantize_kv_rows, cpattn.sparse.dequantize_kv_rows
PARTS = [
    ({"nope": X[:, :511]}, r"nope must be \[num_tokens, 512\] or .* got \[2, 511\]"),
    ({"nope": torch.zeros(2, 3, 512)}, r"nope must be \[num_tokens, 512\] .* got \[2, 3,"),
    ({"rope": X[:, :63]}, r"rope must be \[num_tokens, 64\] .* got \[2, 63\]"),
    ({"rope": torch.zeros(3, 64)}, "rope must have the 2 tokens of nope, got 3"),
]
OUTS = [
    ({"out": ROWS[:1]}, r"out must have shape \[2, 1, 656\], got \[1, 1, 656\]"),
    ({"out": OVER_X}, "out must not overlap nope in memory"),
]
READ = [
    ({"out": X[:, None].bfloat16()}, r"out must have shape \[2, 1, 576\], got \[2, 1, 512\]"),
    ({"rows": ROWS[..., :655]}, r"rows must be 656 bytes wide, got shape \[2, 1"),
    (
        {"rows": torch.zeros(2, 3, 1, 656).byte(), "indices": [0, 5, 6]},
        r"indices must be in \[0, 6\), got 6 at",
    ),
    ({"indices": [-1]}, r"indices must be in \[0, 2\), got -1 at index 0"),
]


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        *((QUANTIZE, *row) for row in PARTS + OUTS),
        *((cpattn.sparse.quantize_kv_rows_separate, *row) for row in PARTS),
        *((DEQUANTIZE, *row) for row in READ),
    ],
)
def test_what_does_not_fit_is_refused(function, change, message):
    good = {"rows": ROWS} if function is DEQUANTIZE else {"nope": X, "rope": X[:, :64]}
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(**good | change)
