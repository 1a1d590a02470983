# SPDX-License-Identifier: Apache-2.0
"""The oracle of the conformance runner is right where no switch is on, and wrong where one is."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from cpattn import reference
from cpattn_proof.conformance import FAULTS, SIGNATURES, Case, Features
from cpattn_proof.conformance.cases import make_batch
from cpattn_proof.conformance.numbers import rounded
from cpattn_proof.conformance.oracle import attend
from cpattn_proof.conformance.signatures.signature import narrowed
from cpattn_proof.conformance.strategies import cases, edge_cases
from support.tolerances import TOLERANCES, assert_close

FEATURES = SIGNATURES["cpattn"].features


def by_reference(case):
    batch = make_batch(case)
    k, v = (x.reshape(-1, case.page_size, *x.shape[1:]) for x in (batch.k, batch.v))
    return reference.paged_attention(
        batch.q, k, v, q_lens=list(case.q_lens), kv_lens=list(case.kv_lens),
        block_tables=batch.block_tables, scale=case.scale, causal=case.causal,
        window=(case.window, case.window_right), softcap=case.softcap, alibi_slopes=batch.slopes,
        sinks=batch.sinks, allow_short_kv=True,
    )  # fmt: skip


def assert_right(case):
    out, lse = by_reference(case)
    batch = make_batch(case)
    ours = attend(batch)
    # A weight is off by twice eps of its score, to which slopes add distances.
    furthest = max(case.q_lens, default=0) + max(case.kv_lens, default=0)
    steepest = 0 if batch.slopes is None else np.abs(batch.slopes).max()
    units = TOLERANCES["restated", "float64"] + 2 * furthest * steepest
    assert_close(ours.out, out, ours.magnitude, "restated", "float64", units)
    size = np.maximum(1, np.abs(np.nan_to_num(lse, neginf=0)))
    assert_close(ours.lse, lse, size, "restated", "float64")


def test_the_oracle_is_the_reference():
    for case in edge_cases(FEATURES):
        assert_right(case)
    given(cases(FEATURES))(settings(max_examples=40)(assert_right))()


def differs(case, switches):
    batch = make_batch(case)
    right, wrong = attend(batch), attend(batch, switches)
    same = [np.array_equal(a, b, equal_nan=True) for a, b in zip(right[:2], wrong[:2], strict=True)]
    return not all(same)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_wrong_oracle_is_wrong_somewhere(fault):
    pads = [
        Case((5, 3), (8, 14), layout="ragged", pad_rows=2, poison=True),
        Case((1, 1), (40, 700), page_size=16, num_heads=2, sinks=True, softcap=3.0, scale=0.5),
    ]
    cases = [case for case in [*edge_cases(FEATURES), *pads] if not case.far]
    for switches in fault.variants:
        special = switches.lse == "free on empty"  # any finite number passes there
        assert special or any(differs(case, switches) for case in cases), switches


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_numbers_are_rounded_as_torch_does(dtype):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x[:4] = [np.nan, np.inf, -np.inf, 0]
    expected = torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(rounded(x, dtype), expected)


FLAGS = [field.name for field in fields(Features) if isinstance(field.default, bool)]


def assert_can_be_said(case, features):
    assert case.layout in features.layouts
    assert case.dtype in features.dtypes
    assert case.causal in features.causal
    for name in ("alibi", "softcap", "sinks", "poison", "pad_rows", "append", "far"):
        assert getattr(features, name) or not getattr(case, name), name
    assert features.groups or case.num_heads == case.num_kv_heads
    assert features.window or case.window is None
    assert features.window_right or case.window_right is None
    assert case.window_right is None or (features.window and not case.causal)
    right = case.causal or case.window_right is not None
    assert case.window is None or right or features.window_without_causal
    assert features.v_head_dim or case.v_head_dim == case.head_dim
    assert not features.same_q_lens or len(set(case.q_lens)) == 1
    short = any(q > kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    assert features.short_kv or not (short and case.causal)
    assert features.prefix or all(q >= kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    assert features.empty or (min(case.kv_lens) > 0 and not (short and case.causal))


def assert_only_such_are_made(features, examples):
    @given(cases(features))
    @settings(max_examples=examples)
    def holds(case):
        assert_can_be_said(case, features)

    for case in edge_cases(features):
        assert_can_be_said(case, features)
    holds()


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNATURES)
def test_only_what_a_signature_can_say_is_made(name):
    usual = SIGNATURES[name]
    assert_only_such_are_made(usual.features, 60)
    for flag in FLAGS:
        if getattr(usual.features, flag):
            assert_only_such_are_made(narrowed(usual, [flag]).features, 20)


@pytest.mark.parametrize("causal", [(True,), (False,), (False, True)])
def test_signatures_of_ones_own_may_say_little(causal):
    features = Features(head_dims=(64,), causal=causal, v_head_dim=True)
    assert_only_such_are_made(features, 10)
    for case in edge_cases(features):
        assert case.head_dim == case.v_head_dim == 64
