# SPDX-License-Identifier: Apache-2.0
"""Split and RMS norm are right, fused or not."""

import itertools

import pytest
import torch

import cpattn
from cpattn import ForwardMode, reference
from support.cases import DTYPES, strided_copy
from support.tolerances import assert_close, rms_norm_units

DIMS = [(1536, 512, 64), (16, 16, 0), (17, 5, 3), (1, 1, 1)]


def make(rows, dims, dtype, weight_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    x = 3 * random(rows, sum(dims))
    weights = [1 + random(dim) / 4 for dim in dims[:2]]
    biases = [random(dim) for dim in dims[:2]]
    x = strided_copy(x.to(getattr(torch, dtype)))
    weight_dtype = getattr(torch, weight_dtype or dtype)
    return x, *(p.to(weight_dtype) for p in (*weights, *biases))


def assert_norm(actual, x, weight, eps, bias, dtype):
    expected = reference.rms_norm(x, weight, eps, bias)
    magnitude = reference.rms_norm(x.abs(), weight.abs(), eps, None if bias is None else bias.abs())
    units = rms_norm_units(x.shape[-1]) if dtype == "float32" else None
    assert_close(actual, expected, magnitude, "rms_norm", dtype, units)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_split_against_the_oracle(isa, dims, dtype, with_bias):
    x, q_weight, kv_weight, q_bias, kv_bias = make(7, dims, dtype, "float32" if with_bias else None)
    if not with_bias:
        q_bias = kv_bias = None
    q, k_nope, k_pe, latent = cpattn.sparse.split_qk_norm(
        x, q_weight, kv_weight, *dims, q_eps=1e-6, kv_eps=1e-2, q_bias=q_bias, kv_bias=kv_bias
    )
    x_q, x_kv, x_pe = x.split(dims, dim=-1)
    assert_norm(q, x_q, q_weight, 1e-6, q_bias, dtype)
    assert k_nope.shape == (7, 1, dims[1])
    assert_norm(k_nope.squeeze(1), x_kv, kv_weight, 1e-2, kv_bias, dtype)
    assert torch.equal(k_pe, x_pe.unsqueeze(1))
    assert torch.equal(latent, x[:, None, dims[0] :])
    assert all(part.dtype == x.dtype for part in (q, k_nope, k_pe, latent))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS)
def test_fused_is_split_with_one_eps(isa, dims, dtype):
    x, q_weight, kv_weight, q_bias, kv_bias = make(5, dims, dtype)
    parts = (x, q_weight, kv_weight, *dims)
    biases = {"q_bias": q_bias, "kv_bias": kv_bias}
    fused = cpattn.sparse.fused_split_qk_norm(*parts, eps=1e-5, **biases)
    split = cpattn.sparse.split_qk_norm(*parts, q_eps=1e-5, kv_eps=1e-5, **biases)
    assert all(torch.equal(a, b) for a, b in zip(fused, split[:3], strict=True))
    default = cpattn.sparse.fused_split_qk_norm(*parts)
    explicit = cpattn.sparse.fused_split_qk_norm(*parts, eps=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(default, explicit, strict=True))


def test_results_do_not_depend_on_rows_or_threads(isa):
    dims = DIMS[0]
    x, q_weight, kv_weight, *_ = make(150, dims, "bfloat16")
    whole = cpattn.sparse.fused_split_qk_norm(x, q_weight, kv_weight, *dims)
    with cpattn.num_threads(1):
        one = cpattn.sparse.fused_split_qk_norm(x, q_weight, kv_weight, *dims)
    part = cpattn.sparse.fused_split_qk_norm(x[70:71], q_weight, kv_weight, *dims)
    for a, b, c in zip(whole, one, part, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[70:71], c)


def test_latent_cache_is_memory_of_its_own():
    x, q_weight, kv_weight, *_ = make(4, (32, 16, 8), "float32")
    before = x.clone()
    *_, k_pe, latent = cpattn.sparse.split_qk_norm(
        x, q_weight, kv_weight, 32, 16, 8, q_eps=1e-6, kv_eps=1e-6
    )
    kept = k_pe.clone()
    latent.zero_()
    assert torch.equal(x, before)
    assert torch.equal(k_pe, kept)


def test_no_rows_give_none():
    x, q_weight, kv_weight, *_ = make(0, (8, 8, 4), "bfloat16")
    q, k_nope, k_pe = cpattn.sparse.fused_split_qk_norm(x, q_weight, kv_weight, 8, 8, 4)
    assert (q.shape, k_nope.shape, k_pe.shape) == ((0, 8), (0, 1, 8), (0, 1, 4))


# --- gates ---


def test_fusing_needs_all_three_conditions():
    for rows, neox, cp in itertools.product([0, 65534, 65535], [False, True], [False, True]):
        allowed = cpattn.sparse.can_fuse_split_qk_norm(rows, neox_rope=neox, uses_prefill_cp=cp)
        assert allowed is (rows < 65535 and not neox and not cp)


def test_prefill_cp_needs_metadata_the_switch_and_an_extend():
    modes = [None, *ForwardMode]
    for mode, metadata, enabled in itertools.product(modes, [False, True], [False, True]):
        used = cpattn.sparse.dsa_use_prefill_cp(mode, has_cp_metadata=metadata, enabled=enabled)
        extend = mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
        assert used is (metadata and enabled and extend)
    with pytest.raises(ValueError, match="forward_mode must be a ForwardMode, got 10"):
        cpattn.sparse.dsa_use_prefill_cp(10, has_cp_metadata=True, enabled=True)


# --- errors ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 23)}, r"x must have q_lora_rank .* = 24 columns, got .*23"),
        ({"q_weight": torch.ones(15)}, "q_weight must have 16 elements, got 15"),
        ({"q_bias": torch.ones(17)}, "q_bias must have 16 elements, got 17"),
        ({"kv_lora_rank": -6}, "q_lora_rank and kv_lora_rank must be positive .* got 16, -6 and 2"),
    ],
)  # fmt: skip
def test_errors_name_argument_rule_and_value(change, message):
    arguments = {
        "x": torch.zeros(2, 24), "q_weight": torch.ones(16), "kv_weight": torch.ones(6),
        "q_lora_rank": 16, "kv_lora_rank": 6, "qk_rope_head_dim": 2,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=f"^fused_split_qk_norm: {message}"):
        cpattn.sparse.fused_split_qk_norm(**arguments)
    with pytest.raises(ValueError, match=f"^split_qk_norm: {message}"):
        cpattn.sparse.split_qk_norm(**arguments, q_eps=1e-6, kv_eps=1e-6)


@pytest.mark.parametrize("eps", [-1e-6, float("nan")])
def test_eps_must_not_be_negative(eps):
    x, q_weight, kv_weight, *_ = make(2, (16, 8, 4), "float32")
    for name in ("q_eps", "kv_eps"):
        given = {"q_eps": 1e-6, "kv_eps": 1e-6} | {name: eps}
        with pytest.raises(ValueError, match=f"^split_qk_norm: {name} must be >= 0, got"):
            cpattn.sparse.split_qk_norm(x, q_weight, kv_weight, 16, 8, 4, **given)
