# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transform, quantisation and the cache of the indexer's keys are right."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from cpattn import reference, sparse
from support.cases import DTYPES, strided_copy
from support.examples import examples
from support.tolerances import assert_close, hadamard_units

FP8 = torch.float8_e4m3fn


def make(shape, dtype="float32", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-8, 8, shape, generator=generator))
    return strided_copy(x.to(getattr(torch, dtype)))


# --- Hadamard ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])
def test_hadamard_against_the_oracle(isa, dim, dtype):
    x = make((3, 1, dim), dtype)
    actual = sparse.hadamard_transform(x)
    assert (actual.shape, actual.dtype) == (x.shape, x.dtype)
    expected = reference.hadamard_transform(x.flatten(0, 1))
    size = x.double().abs().sum(-1).flatten().numpy()[:, None] * dim**-0.5
    magnitude = np.broadcast_to(size, expected.shape)
    units = hadamard_units(dim) if dtype == "float32" else None
    assert_close(actual.flatten(0, 1), expected, magnitude, "hadamard", dtype, units)


def test_hadamard_of_rows_does_not_depend_on_their_number_or_on_threads(isa):
    x = make((1201, 2, 64), "bfloat16")
    with cpattn.num_threads(1):
        whole = sparse.hadamard_transform(x)
    with cpattn.num_threads(3):
        assert torch.equal(sparse.hadamard_transform(x), whole)
    for rows in (slice(0, 1), slice(3, 10), slice(600, 1201)):
        assert torch.equal(sparse.hadamard_transform(x[rows]), whole[rows])


# --- quantisation ---


def expected_codes(x, dtype, scale_fmt):
    """Compute the definition in torch, for finite numbers."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1).clamp(min=1e-4) / (127 if dtype == "int8" else 448)
    if scale_fmt == "ue8m0":
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = (groups / scale.unsqueeze(-1)).flatten(-2)
    if dtype == "int8":
        return codes.round().to(torch.int8), scale
    return codes.clamp(-448, 448).to(FP8), scale


FORMATS = [("float8_e4m3fn", None), ("float8_e4m3fn", "ue8m0"), ("int8", None)]


@pytest.mark.parametrize(("code", "scale_fmt"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 128), (128,), (5, 3, 128), (33, 384), (2, 1, 2, 1, 3, 128)])
def test_codes_are_those_of_the_definition(isa, shape, dtype, code, scale_fmt):
    x = make(shape, dtype)
    if len(x):
        x[..., :128].select(0, 0).mul_(0)  # zeros count as 1e-4
    codes, scale = sparse.quantize_index(x, dtype=code, scale_fmt=scale_fmt)
    expected, expected_scale = expected_codes(x, code, scale_fmt)
    assert codes.dtype == getattr(torch, code)
    assert scale.shape == (*shape[:-1], shape[-1] // 128)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("power", [-20, -3, 0, 7])
def test_scales_that_are_powers_of_two_stay_and_others_are_rounded_up(isa, power):
    x = np.zeros((3, 128), np.float32)
    exact = np.float32(448 * 2.0**power)
    x[:, 5] = [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(1e9))]
    _, scale = sparse.quantize_index(x, scale_fmt="ue8m0")
    # 448 / 2^24 is less than half a step of the scale: the quotient rounds to the power itself.
    assert list(scale[:2, 0]) == [2.0**power, 2.0**power]
    assert scale[2, 0] in (2.0**power, 2.0 ** (power + 1))
    assert scale[2, 0] == 2.0 ** np.ceil(np.log2(np.float64(x[2, 5] / np.float32(448))))


@pytest.mark.parametrize(("code", "nan"), [("float8_e4m3fn", 0x7F), ("int8", 0)])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_group_that_is_not_finite_is_marked(isa, code, nan, bad):
    x = make((2, 256))
    x[1, 130] = float(bad)
    codes, scale = sparse.quantize_index(x, dtype=code)
    assert scale.isnan().tolist() == [[False, False], [False, True]]
    assert torch.all(codes.view(torch.uint8)[1, 128:] == nan)
    assert torch.equal(
        codes.view(torch.uint8)[0], sparse.quantize_index(x[0], dtype=code)[0].view(torch.uint8)
    )


# --- cache ---


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_keys_are_written_where_their_slots_say(data):
    pages, page_size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 64]))
    total = pages * page_size
    slots = data.draw(st.lists(st.integers(-1, total - 1), max_size=2 * total))
    k = make((len(slots), 128), "bfloat16")
    codes, scale = sparse.quantize_index(k)
    cache = torch.full((pages, page_size * 132), 0xAB, dtype=torch.uint8)
    expected = cache.clone()
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        page, offset = divmod(slot, page_size)
        row, at = expected[page], page_size * 128 + offset * 4
        row[offset * 128 : offset * 128 + 128] = codes[i].view(torch.uint8)
        row[at : at + 4] = scale[i].view(torch.uint8)
    given_as = data.draw(st.sampled_from([list, np.array, torch.tensor]))
    given_slots = given_as(slots) if slots else slots
    for k_given, scale_given in [(codes, scale), (k.unsqueeze(1), None), (codes, scale.flatten())]:
        written = torch.full_like(cache, 0xAB)
        sparse.write_index_k_cache(written, given_slots, k_given, scale_given)
        assert torch.equal(written, expected)
    last = {slot: i for i, slot in enumerate(slots) if slot >= 0}
    read, read_scale = sparse.read_index_k_cache(expected, list(last))
    assert torch.equal(read.view(torch.uint8), codes.view(torch.uint8)[list(last.values())])
    assert torch.equal(read_scale, scale[list(last.values())])


def test_int8_keys_and_power_of_two_scales_go_through_the_cache():
    k = make((2, 128))
    cache = torch.zeros(1, 4 * 132, dtype=torch.uint8)
    codes, scale = sparse.quantize_index(k, dtype="int8")
    sparse.write_index_k_cache(cache, [3, 0], codes, scale)
    read = sparse.read_index_k_cache(cache, [3, 0], dtype="int8")
    assert torch.equal(read[0], codes)
    assert torch.equal(read[1], scale)
    sparse.write_index_k_cache(cache, [1, 2], k, scale_fmt="ue8m0")
    read = sparse.read_index_k_cache(cache, [1, 2])[1]
    assert torch.equal(read, sparse.quantize_index(k, scale_fmt="ue8m0")[1])


# --- errors ---

CODES, SCALE = torch.zeros(2, 128).to(FP8), torch.zeros(2)
CACHE = torch.zeros(2, 3 * 132, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sparse.hadamard_transform(torch.zeros(2, 96)),
         r"hadamard_transform: the last dimension of x must be a power of two, got .*\[2, 96\]"),
        (lambda: sparse.hadamard_transform(torch.zeros(2, 0)), "hadamard_transform: the last dim"),
        (lambda: sparse.hadamard_transform(torch.zeros(())), "hadamard_transform: x must have 1"),
        (lambda: sparse.quantize_index(torch.zeros(2, 64)),
         r"quantize_index: the last dimension of x must be a multiple of 128, got shape \[2, 64\]"),
        (lambda: sparse.quantize_index(torch.zeros(())), "quantize_index: x must have 1 to 6"),
        (lambda: sparse.quantize_index(torch.zeros(128).double()), "quantize_index: x must be"),
        (lambda: sparse.quantize_index(torch.zeros(128), dtype="int4"), "quantize_index: dtype mu"),
        (lambda: sparse.quantize_index(torch.zeros(128), scale_fmt="e8"),
         "quantize_index: scale_fmt must be None or 'ue8m0', got 'e8'"),
        (lambda: sparse.quantize_index(torch.zeros(128), dtype="int8", scale_fmt="ue8m0"),
         "quantize_index: scale_fmt 'ue8m0' is for float8_e4m3fn, not int8"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 6], CODES, SCALE),
         r"write_index_k_cache: slots must be in \[-1, 6\), got 6 at index 1"),
        (lambda: sparse.write_index_k_cache(CACHE, [-2, 0], CODES, SCALE),
         r"write_index_k_cache: slots must be in \[-1, 6\), got -2 at index 0"),
        (lambda: sparse.write_index_k_cache(CACHE, [0], CODES, SCALE),
         r"write_index_k_cache: k must be \[1, 128\], one row per slot, got \[2, 128\]"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 1], CODES[:, :64], SCALE),
         r"write_index_k_cache: k must be \[2, 128\]"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 1], torch.zeros(2, 64)),
         r"write_index_k_cache: k must be .* \[num_tokens, 1, 128\], got \[2, 64\]"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 1], CODES.float(), SCALE),
         "write_index_k_cache: k must be float8_e4m3fn, int8 or uint8 if k_scale is given"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 1], CODES, SCALE[:1]),
         r"write_index_k_cache: k_scale must be contiguous with 2 elements, got shape \[1\]"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 1], CODES, SCALE, scale_fmt="ue8m0"),
         "write_index_k_cache: scale_fmt must be None if k_scale is given"),
        (lambda: sparse.write_index_k_cache(CACHE[:, 1:], [0, 1], CODES, SCALE),
         r"write_index_k_cache: cache must be \[num_pages, page_size \* 132\], got \[2, 395\]"),
        (lambda: sparse.write_index_k_cache(CACHE, [0, 1], CACHE[:, :128], SCALE),
         "write_index_k_cache: cache must not overlap k in memory"),
        (lambda: sparse.read_index_k_cache(CACHE, [-1]),
         r"read_index_k_cache: slots must be in \[0, 6\), got -1 at index 0"),
        (lambda: sparse.read_index_k_cache(CACHE, [0], dtype="uint8"), "read_index_k_cache: dtype"),
    ],
)  # fmt: skip
def test_errors_name_argument_rule_and_value(call, message):
    before = CACHE.clone()
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
    assert torch.equal(CACHE, before)
