# SPDX-License-Identifier: Apache-2.0
"""The AMX path: how exact its softmax is, and that its twin has the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cpattn
from cases import Case, make_inputs
from cpattn import _core

AMX_ISAS = [isa for isa in ("amx-twin", "amx") if isa in cpattn.supported_isas()]


@pytest.fixture(params=AMX_ISAS or [pytest.param("", marks=pytest.mark.skip("no AMX path here"))])
def amx(request):
    before = cpattn.active_isa()
    _core.set_isa(request.param)
    yield request.param
    _core.set_isa(before)


def test_weights_are_as_exact_as_rounded_exponentials(amx):
    """Weights themselves come out where V is the identity; compare their mean squared error.

    The yardstick has an exact exponential, rounded to bfloat16 like the operands of the product,
    and an exact sum.
    """
    rng = np.random.default_rng(0)
    keys, heads = 512, 32
    q = torch.from_numpy(rng.standard_normal((1, heads, 64))).bfloat16()
    k = torch.from_numpy(rng.standard_normal((1, keys, 1, 64))).bfloat16()
    v = torch.eye(keys, dtype=torch.bfloat16)[None, :, None]
    out = cpattn.paged_attention(q, k, v, q_lens=[1], kv_lens=[keys], block_tables=[[0]])

    scores = q[0].double() @ k[0, :, 0].double().T / 8
    exponentials = torch.exp(scores - scores.max(dim=1, keepdim=True).values)
    exact = exponentials / exponentials.sum(dim=1, keepdim=True)
    yardstick = exponentials.bfloat16().double() / exponentials.sum(dim=1, keepdim=True)

    def error(weights):
        return ((weights.double() / exact - 1) ** 2).mean().sqrt()

    assert error(out[0]) <= 1.25 * error(yardstick.bfloat16())


@pytest.mark.skipif(len(AMX_ISAS) < 2, reason="this processor has no AMX")
@pytest.mark.parametrize("head_dim", [64, 80, 192])
def test_the_twin_has_the_bits_of_the_hardware(head_dim):
    inputs = make_inputs(
        Case(q_lens=(300, 7), kv_lens=(700, 900), head_dim=head_dim, num_heads=8, dtype="bfloat16")
    )
    before = cpattn.active_isa()
    results = []
    for isa in AMX_ISAS:
        _core.set_isa(isa)
        results.append(cpattn.paged_attention(**inputs, return_lse=True))
    _core.set_isa(before)
    for twin, hardware in zip(*results, strict=True):
        assert torch.equal(twin, hardware)
