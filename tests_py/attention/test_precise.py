# SPDX-License-Identifier: Apache-2.0
"""Results in bfloat16 are rounded once for few rows, and for all rows with `precise`."""

import itertools

import numpy as np
import pytest
import torch

import cpattn
from cpattn import reference
from cpattn.sparse import flash_mla_sparse_fwd
from support.cases import Case, assert_attention, expected_attention, make_inputs, random_bias
from support.cp_batches import Batch
from support.tolerances import SHARE_ROUNDED_ONCE, rounds_weights, share_rounded_once

LENS = {"q_lens": (1, 1, 0), "kv_lens": (700, 41, 5), "page_size": 64, "dtype": "bfloat16"}
GQA = Case(num_heads=8, num_kv_heads=2, head_dim=128, **LENS)
# The shape of vLLM's test of decoding MLA, which is compute-bound.
MLA = Case(
    q_lens=(1,) * 4, kv_lens=(256, 131, 300, 17), page_size=16, num_heads=16, num_kv_heads=1,
    head_dim=576, v_head_dim=512, dtype="bfloat16", options={"scale": 0.0625},
)  # fmt: skip
BIAS = random_bias(LENS["q_lens"], LENS["kv_lens"], 8)
FEW_ROWS = [
    GQA,
    GQA.with_(q_lens=(4, 2, 0), num_kv_heads=8),
    GQA.with_(num_kv_heads=8),
    GQA.with_(num_heads=4, num_kv_heads=1, head_dim=80, v_head_dim=48),
    GQA.with_(head_dim=72, options={"bias": BIAS}),
    MLA.with_(num_heads=4),
]
MANY_ROWS = Case(
    q_lens=(70, 3), kv_lens=(300, 90), num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16"
)


def share(out, inputs):
    expected = expected_attention(inputs)
    assert_attention(out, None, inputs, expected=expected, precise=True)
    return share_rounded_once(out, expected.out)


@pytest.mark.parametrize("case", FEW_ROWS, ids=str)
def test_few_rows_are_rounded_once(isa, case):
    inputs = make_inputs(case)
    assert share(cpattn.paged_attention(**inputs), inputs) >= SHARE_ROUNDED_ONCE


def test_weights_with_factors_of_codes_are_rounded_once(isa):
    inputs = make_inputs(GQA)
    factors = {name: torch.rand(inputs[name].shape[:-1]) + 0.5 for name in ("k_cache", "v_cache")}
    for name in factors:
        inputs[name] = inputs[name].nan_to_num().to(torch.float8_e4m3fn)
    out = cpattn.paged_attention(**inputs, k_scale=factors["k_cache"], v_scale=factors["v_cache"])
    for name, scale in factors.items():
        inputs[name] = inputs[name].double() * scale[..., None].double()
    exact, _ = reference.paged_attention(**inputs)
    assert share_rounded_once(out, exact) >= SHARE_ROUNDED_ONCE


@pytest.mark.parametrize("num_heads", [4, 128])
def test_selected_keys_of_few_heads_are_rounded_once_on_any_number_of_threads(isa, num_heads):
    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.standard_normal((2, num_heads, 576))).bfloat16()
    kv = torch.from_numpy(rng.standard_normal((400, 1, 576))).bfloat16()
    indices = torch.from_numpy(rng.permuted(np.tile(np.arange(400), (2, 1)), axis=1)[:, None, :300])
    one, *_ = flash_mla_sparse_fwd(q, kv, indices.int(), 0.0625, num_threads=1)
    for threads in (4, 16):
        many, *_ = flash_mla_sparse_fwd(q, kv, indices.int(), 0.0625, num_threads=threads)
        assert torch.equal(many, one)
    rows = kv[indices[:, 0]].flatten(0, 1)
    exact, _ = reference.paged_attention(
        q, rows, rows[..., :512], q_lens=[1, 1], kv_lens=[300, 300], page_size=1, scale=0.0625,
        block_tables=np.arange(600).reshape(2, 300),
    )  # fmt: skip
    if num_heads == 4 or not rounds_weights("bfloat16"):
        assert share_rounded_once(one, exact) >= SHARE_ROUNDED_ONCE


@pytest.mark.parametrize(
    "case", [MANY_ROWS, MANY_ROWS.with_(options={"window": 60, "softcap": 20.0}), MLA], ids=str
)
def test_many_rows_are_rounded_once_if_that_is_asked(isa, case):
    inputs = make_inputs(case)
    precise = cpattn.paged_attention(**inputs, precise=True)
    assert share(precise, inputs) >= SHARE_ROUNDED_ONCE
    plain = cpattn.paged_attention(**inputs)
    if rounds_weights("bfloat16"):
        assert share_rounded_once(plain, expected_attention(inputs).out) < SHARE_ROUNDED_ONCE
    else:
        assert torch.equal(plain, precise)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_changes_for_other_types(isa, dtype):
    inputs = make_inputs(MANY_ROWS.with_(dtype=dtype))
    assert torch.equal(
        cpattn.paged_attention(**inputs, precise=True), cpattn.paged_attention(**inputs)
    )


def test_bits_of_precise_rows_depend_on_nothing_else_if_that_is_asked(isa):
    options = {"precise": True, "batch_invariant": True}
    inputs = make_inputs(MANY_ROWS)
    whole = cpattn.paged_attention(**inputs, **options, num_threads=1)
    assert torch.equal(cpattn.paged_attention(**inputs, **options, num_threads=3), whole)
    for first, end in itertools.pairwise([0, 1, 17, 64, 70]):
        part = inputs | {
            "q": inputs["q"][first:end], "q_lens": [end - first], "kv_lens": [230 + end],
            "block_tables": inputs["block_tables"][:1],
        }  # fmt: skip
        assert torch.equal(cpattn.paged_attention(**part, **options), whole[first:end])


def test_a_plan_says_whether_its_runs_are_precise(isa):
    inputs = make_inputs(MANY_ROWS)
    sizes = {"num_pages": len(inputs["k_cache"]), "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    batch = {name: inputs[name] for name in ("q_lens", "kv_lens", "block_tables", "page_size")}
    plan = cpattn.plan_attention(**batch, **sizes, precise=True)
    out = cpattn.run_attention(plan, inputs["q"], inputs["k_cache"], inputs["v_cache"])
    assert torch.equal(out, cpattn.paged_attention(**inputs, precise=True))
    assert plan != cpattn.plan_attention(**batch, **sizes)


def test_ranks_have_the_precise_bits_of_one_process(isa):
    batch = Batch((40, 3), (20, 33), 2, "zigzag", dtype="bfloat16", options={"precise": True})
    whole = batch.whole()
    assert all(map(torch.equal, batch.all_ranks(), whole))
    del batch.inputs["precise"]
    assert share(whole[0], batch.inputs) >= SHARE_ROUNDED_ONCE
