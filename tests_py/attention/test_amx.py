# SPDX-License-Identifier: Apache-2.0
"""The AMX path and its twin are accurate, also with float16 in two parts.

All calls are batch-invariant, so that even few rows use the tiles.
"""

import math

import numpy as np
import pytest
import torch

import cpattn
from cpattn import _core
from support.cases import Case, assert_attention, expected_attention, make_inputs
from support.tolerances import to_float64

AMX_ISAS = [isa for isa in ("amx-twin", "amx") if isa in cpattn.supported_isas()]


@pytest.fixture(params=AMX_ISAS or [pytest.param("", marks=pytest.mark.skip("no AMX path here"))])
def amx(request):
    before = cpattn.active_isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


def run(inputs):
    return cpattn.paged_attention(**inputs, return_lse=True, batch_invariant=True)


def on(isa, inputs):
    before = cpattn.active_isa()
    _core.set_isa(isa)
    try:
        return run(inputs)
    finally:
        _core.set_isa(before)


def one_page(q, k, v, **options):
    """Attend with queries [tokens, heads, dim] behind all keys [keys, heads, dim] of a sequence."""
    lens = {"q_lens": [len(q)], "kv_lens": [len(k)], "block_tables": [[0]]}
    return {"q": q, "k_cache": k[None], "v_cache": v[None], "causal": False, **lens, **options}


DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def test_weights_are_as_exact_as_rounded_exponentials(amx):
    """Results are the weights if V is the identity; compare their mean squared error.

    The reference has an exact exponential, rounded to bfloat16 like the operands of the product,
    and an exact sum.
    """
    rng = np.random.default_rng(0)
    keys, heads = 512, 32
    q = torch.from_numpy(rng.standard_normal((1, heads, 64))).bfloat16()
    k = torch.from_numpy(rng.standard_normal((1, keys, 1, 64))).bfloat16()
    out, _ = run(one_page(q, k[0], torch.eye(keys, dtype=torch.bfloat16)[:, None]))

    scores = q[0].double() @ k[0, :, 0].double().T / 8
    exponentials = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
    exact = exponentials / exponentials.sum(dim=1, keepdim=True)
    yardstick = exponentials.bfloat16().double() / exponentials.sum(dim=1, keepdim=True)

    def error(weights):
        return ((weights.double() / exact - 1) ** 2).mean().sqrt()

    assert error(out[0]) <= 1.25 * error(yardstick.bfloat16())


@DTYPES
def test_outputs_do_not_depend_on_whether_the_lse_is_wanted(amx, dtype):
    """The LSE sums exact exponentials; P V has rounded ones, and divides by their sum."""
    inputs = make_inputs(Case(q_lens=(150,), kv_lens=(700,), num_heads=6, dtype=dtype))
    assert torch.equal(run(inputs)[0], cpattn.paged_attention(**inputs, batch_invariant=True))


@DTYPES
@pytest.mark.parametrize("options", [{}, {"window": 1100}])
def test_more_keys_than_are_packed_at_a_time(amx, options, dtype):
    """Infinite values in several blocks spoil only the rows that see them."""
    inputs = make_inputs(
        Case(q_lens=(150,), kv_lens=(2300,), num_kv_heads=1, dtype=dtype, options=options)
    )
    for token, value in [(1100, math.inf), (1300, -math.inf), (2200, math.inf)]:
        inputs["v_cache"][inputs["block_tables"][0, token // 16], token % 16, 0, token % 7] = value
    assert_attention(*run(inputs), inputs)


def test_float16_is_as_exact_as_in_float32(amx):
    """Errors exceed those of the path without AMX, in float32, by at most a hundredth."""
    case = Case(q_lens=(40,), kv_lens=(500,), head_dim=128, num_heads=8, dtype="float16")
    inputs = make_inputs(case)
    expected = expected_attention(inputs).out

    def error(isa):
        return np.linalg.norm(to_float64(on(isa, inputs)[0]) - expected)

    assert error(amx) <= 1.01 * error("avx512")


def random_float16(rng, shape, bits=11):
    """Return integers of so many bits, with both signs."""
    limit = 2**bits
    return torch.from_numpy(rng.integers(1 - limit, limit, shape)).half()


@pytest.mark.parametrize("exponent", [-8, 0, 5])
def test_powers_of_two_do_not_change_float16_scores(amx, exponent):
    """Queries go from the largest float16 on, 65504, and keys down to its subnormal numbers."""
    rng = np.random.default_rng(0)
    q, v = random_float16(rng, (3, 4, 64)), random_float16(rng, (90, 1, 32))
    k = random_float16(rng, (90, 1, 64), bits=3) * 2.0**-10
    k[::3] = random_float16(rng, (30, 1, 64)) * 2.0**-19
    scale = 2.0**-6
    plain = one_page(q, k, v, scale=scale)
    assert_attention(*run(plain), plain)
    shifted = one_page(q * 2.0**exponent, k * 2.0**-5, v, scale=scale * 2.0 ** (5 - exponent))
    assert float(shifted["q"].abs().max()) <= 65504
    assert all(map(torch.equal, run(shifted), run(plain)))


@pytest.mark.parametrize("value", [65504.0, -65504.0, 65472.0, 2.0**-24, 3 * 2.0**-24, 2047.0])
def test_float16_values_of_any_size_come_out_exactly(amx, value):
    q, k = torch.randn(2, 40, 4, 32, generator=torch.Generator().manual_seed(0)).half()
    v = torch.full_like(k, value)
    assert torch.equal(run(one_page(q, k, v))[0], v)


GROWTHS = [1.0, 7.9375, 8.0, 8.0625, 9.0, 15.0, 16.0, 128.0, 300.0, 1e4, 30000.0]


@pytest.mark.parametrize("start", [1, 31, 32, 127, 128, 200, 299])
def test_float16_scores_may_outgrow_earlier_ones(amx, start):
    """The score of each head is 0 in base 2, then its growth, then twice that."""
    keys = 310
    position = torch.arange(keys)[:, None]
    growth = torch.tensor(GROWTHS)
    scores = torch.where(position < start, 0.0, torch.where(position < 305, growth, 2 * growth))
    scores = torch.where(position % 2 == 0, scores, -scores)
    k = torch.zeros(keys, len(GROWTHS), 16).half()
    k[..., 0] = scores
    q = torch.zeros(1, len(GROWTHS), 16).half()
    q[..., 0] = 1.0
    v = torch.randn(keys, len(GROWTHS), 32, generator=torch.Generator().manual_seed(0)).half()
    inputs = one_page(q, k, v, scale=math.log(2))
    assert_attention(*run(inputs), inputs)


# The second part is positive, negative and zero.
@pytest.mark.parametrize("query", [1 + 2.0**-10, 1 - 2.0**-11, 1.0])
def test_float16_keys_of_minus_infinity_have_no_weight(amx, query):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(300, 2, 32, generator=generator).half() for _ in range(3))
    q[0, :, 0] = query
    k[:, :, 0] = -1.0
    k[:290, :, 0] = -math.inf
    q, without = q[:1], one_page(q[:1], k[290:], v[290:])
    assert_attention(*run(one_page(q, k, v)), without)
    k[:, :, 0] = -math.inf
    for element in (query, math.inf):
        q[:, :, 0] = element
        out, lse = run(one_page(q, k, v))
        assert torch.all(out == 0)
        assert torch.all(torch.isneginf(lse))


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 2), ("float16", 16)])
def test_few_rows_take_the_vector_units(amx, dtype, rows):
    """A KV head with up to so many rows uses vector units if bits may depend on the batch."""
    for tokens, by_vectors in [(rows // 2, True), (rows // 2 + 1, False)]:
        case = Case(q_lens=(tokens,), kv_lens=(300,), num_heads=2, num_kv_heads=1, dtype=dtype)
        inputs = make_inputs(case)
        _, lse = cpattn.paged_attention(**inputs, return_lse=True)
        _core.set_isa("avx512")
        _, widened = cpattn.paged_attention(**inputs, return_lse=True)
        _core.set_isa(amx)
        assert torch.equal(lse, widened) == by_vectors
        assert torch.equal(lse, run(inputs)[1]) != by_vectors


@pytest.mark.skipif(len(AMX_ISAS) < 2, reason="this processor has no AMX")
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 80, 192])
def test_the_twin_has_the_bits_of_the_hardware(head_dim, dtype):
    inputs = make_inputs(
        Case(q_lens=(300, 7), kv_lens=(700, 900), head_dim=head_dim, num_heads=8, dtype=dtype)
    )
    assert all(map(torch.equal, *[on(isa, inputs) for isa in AMX_ISAS]))
