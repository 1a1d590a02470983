# SPDX-License-Identifier: Apache-2.0
"""flash_mla_sparse_fwd agrees with the oracle, and does not depend on what must not matter."""

import functools

import numpy as np
import pytest
import torch

import cpattn
from cpattn import reference
from support.cases import DTYPES
from support.sparse.sparse_mla_cases import (
    Case,
    assert_result,
    expanded,
    expected_result,
    fp8_rows,
    make_inputs,
)

DEFAULT = Case()
CASES = [
    DEFAULT,
    DEFAULT.with_(sinks=True),
    DEFAULT.with_(lengths=True),
    DEFAULT.with_(index_dtype="int64"),
    DEFAULT.with_(counts=(1, 31, 32, 33), num_heads=1),
    DEFAULT.with_(counts=(1000, 257, 513), topk=1100, num_heads=3, head_dim=16, v_head_dim=16),
    DEFAULT.with_(counts=(300, 64), topk=300, num_heads=128, lengths=True, sinks=True),
    DEFAULT.with_(counts=(200, 129), topk=200, num_heads=24, head_dim=576, v_head_dim=512),
    DEFAULT.with_(counts=(), topk=5),
    DEFAULT.with_(counts=(0, 0), topk=0),
]


def bits(result):
    return [x.view(torch.uint8).numpy().tobytes() for x in result]


@functools.cache
def inputs_and_expected(index, dtype):
    inputs = make_inputs(CASES[index].with_(dtype=dtype))
    return inputs, expected_result(inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_against_the_oracle(isa, index, dtype):
    inputs, expected = inputs_and_expected(index, dtype)
    result = cpattn.sparse.flash_mla_sparse_fwd(**inputs)
    assert [x.dtype for x in result] == [inputs["q"].dtype, torch.float32, torch.float32]
    assert_result(result, inputs, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_logit_is_exact(isa, dtype):
    """Products of small integers are exact, and so are their sums in any precision."""
    rng = np.random.default_rng(0)
    kv = torch.from_numpy(rng.integers(-3, 4, (600, 1, 32))).to(getattr(torch, dtype))
    q = torch.from_numpy(rng.integers(-3, 4, (2, 70, 32))).to(kv.dtype)
    indices = np.stack([rng.permutation(600)[:500] for _ in range(2)])
    _, max_logits, _ = cpattn.sparse.flash_mla_sparse_fwd(q, kv, indices, 0.3, d_v=16)
    for token in range(2):
        scores = q[token].double() @ kv[indices[token], 0].double().T
        expected = scores.max(dim=1).values.float() * torch.tensor(0.3)
        torch.testing.assert_close(max_logits[token], expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_grow_and_shrink(isa, dtype):
    """The running maximum rises again and again; the largest logit is in the middle."""
    size = np.concatenate([np.arange(1, 300), np.arange(300, 0, -1)])
    kv = torch.from_numpy(size[:, None, None] * np.ones((1, 1, 16))).to(getattr(torch, dtype))
    inputs = {
        "q": torch.ones(1, 3, 16, dtype=kv.dtype),
        "kv": kv,
        "indices": torch.arange(len(size), dtype=torch.int32)[None],
        "sm_scale": 0.25,
        "d_v": 16,
    }
    result = cpattn.sparse.flash_mla_sparse_fwd(**inputs)
    assert_result(result, inputs)
    assert torch.all(result[1] == 1200)


def test_not_a_number_stays_in_its_row(isa):
    """A NaN that a token names makes that token NaN, and no other."""
    for dtype in DTYPES:
        inputs = make_inputs(DEFAULT.with_(counts=(64, 64, 64), num_heads=40, dtype=dtype))
        row = inputs["indices"][1, 0, 37]
        inputs["indices"][2][inputs["indices"][2] == row] = -1
        inputs["indices"][0][inputs["indices"][0] == row] = -1
        clean = cpattn.sparse.flash_mla_sparse_fwd(**inputs)
        inputs["kv"][row, 0, 20] = torch.nan
        for before, after in zip(clean, cpattn.sparse.flash_mla_sparse_fwd(**inputs), strict=True):
            assert torch.all(torch.isnan(after[1]))
            assert torch.equal(before[0], after[0])
            assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("num_heads", [1, 16, 100])
def test_bits_do_not_depend_on_threads_or_other_tokens(isa, num_heads):
    """Context parallelism deals tokens out, and each rank gets the bits that one rank gets."""
    inputs = make_inputs(DEFAULT.with_(num_heads=num_heads, dtype="bfloat16", lengths=True))
    expected = cpattn.sparse.flash_mla_sparse_fwd(**inputs, num_threads=1)
    for threads in (2, 7, 64):
        assert bits(cpattn.sparse.flash_mla_sparse_fwd(**inputs, num_threads=threads)) == bits(
            expected
        )
    for token in range(len(inputs["q"])):
        own = inputs | {
            name: inputs[name][token : token + 1] for name in ("q", "indices", "topk_length")
        }
        result = cpattn.sparse.flash_mla_sparse_fwd(**own, num_threads=64)
        assert bits(result) == bits([x[token : token + 1].contiguous() for x in expected])


@pytest.mark.parametrize("num_heads", [1, 20, 128])
def test_fp8_rows_give_the_bits_of_expanded_ones(isa, num_heads):
    rows = fp8_rows(90)
    rows[80:, 0, 300] = 127  # no query names these rows of NaN
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "q": torch.randn(3, num_heads, 576, generator=generator).to(torch.bfloat16),
        "indices": torch.randint(-20, 80, (3, 300), generator=generator),
        "sm_scale": 0.05,
    }
    expected = cpattn.sparse.flash_mla_sparse_fwd(kv=expanded(rows), **arguments)
    assert not torch.any(torch.isnan(expected[0]))
    pages = rows.unflatten(0, (10, 9))
    spaced = torch.zeros(90, 3, 700, dtype=torch.uint8)[:, 1:2, 3:659].copy_(rows)
    for kv in (rows, rows.view(torch.float8_e4m3fn), pages, spaced):
        assert bits(cpattn.sparse.flash_mla_sparse_fwd(kv=kv, **arguments)) == bits(expected)


def test_a_nan_among_fp8_rows_stays_in_its_token(isa):
    rows = fp8_rows(90)
    arguments = {
        "q": torch.ones(2, 5, 576, dtype=torch.bfloat16),
        "indices": torch.arange(90, dtype=torch.int32).view(2, 1, 45),
        "sm_scale": 0.05,
    }
    expected = cpattn.sparse.flash_mla_sparse_fwd(kv=rows, **arguments)
    rows[7, 0, 100] = 127
    for before, after in zip(
        expected, cpattn.sparse.flash_mla_sparse_fwd(kv=rows, **arguments), strict=True
    ):
        assert torch.equal(before[1], after[1])
        assert torch.all(torch.isnan(after[0]))


@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("kv_shape", [(0, 1, 32), (5, 0, 1, 32)])
@pytest.mark.parametrize("topk", [0, 4])
def test_nothing_to_attend_to(heads, kv_shape, topk):
    out, max_logits, lse = cpattn.sparse.flash_mla_sparse_fwd(
        np.ones((3, heads, 32), np.float32), np.ones(kv_shape, np.float32),
        np.zeros((3, 1, topk), np.int64), 1.0, d_v=16, attn_sink=np.zeros(heads, np.float32),
    )  # fmt: skip
    assert out.shape == (3, heads, 16)
    assert not out.any()
    assert np.all(np.isneginf(max_logits))
    assert np.all(np.isneginf(lse))


def test_the_oracle_by_hand():
    q = np.array([[[1.0, 0.0]]])
    kv = np.log([[[2.0, 1.0]], [[8.0, 1.0]], [[5.0, 5.0]]])
    kv[:, 0, 1] = [3, 4, np.nan]
    out, max_logits, lse = reference.flash_mla_sparse_fwd(
        q, kv, np.array([[1, -1, 0, 3, 2]]), 1.0, d_v=1, topk_length=[4], attn_sink=np.log([10.0])
    )
    assert out.item() == pytest.approx((8 * np.log(8) + 2 * np.log(2)) / 20)
    assert max_logits.item() == pytest.approx(np.log(8))
    assert lse.item() == pytest.approx(np.log(10))


ERRORS = [
    (
        {"q": torch.zeros(3, 4, 64).double(), "out": torch.zeros(3, 4, 48).double()},
        "q must be float32, float16 or bfloat16",
    ),
    ({"q": torch.zeros(3, 4, 577)}, r"head_dim must be in \[1, 576\], got 577"),
    ({"d_v": 0, "out": None}, r"d_v must be in \[1, 576\], got 0"),
    ({"d_v": -16, "out": None}, "d_v must be .* got -16"),
    ({"d_v": 80}, r"d_v must be at most head_dim \(64\), got 80"),
    ({"kv": torch.zeros(9, 1, 80)}, r"kv must have shape \[rows, 1, 64\] .*80\]"),
    ({"kv": torch.zeros(9, 2, 64)}, r"kv must have shape \[rows, 1, 64\]"),
    ({"kv": torch.zeros(9, 64)}, r"kv must have shape .* got \[9, 64\]"),
    ({"kv": torch.zeros(9, 1, 656).byte()}, "with FP8 rows q must be bfloat16"),
    ({"kv": torch.zeros(4, 6, 1, 64)[:, :5]}, "the pages of .*elements apart, got 384"),
    ({"indices": torch.zeros(2, 8).int()}, r"indices must have shape \[3, 1, topk"),
    ({"indices": torch.zeros(3, 2, 8).int()}, r"got \[3, 2, 8\]"),
    ({"indices": torch.zeros(3, 16).int()[:, ::2]}, "indices .*last dimension"),
    ({"sm_scale": 0.0}, "sm_scale must be a positive number, got 0"),
    ({"sm_scale": 1e300}, "sm_scale must be in .*, the range of float32"),
    ({"sm_scale": float("nan")}, "sm_scale must be a positive number, got nan"),
    ({"attn_sink": torch.zeros(5)}, r"attn_sink must have shape \[4\], got \[5\]"),
    ({"topk_length": [1, 2]}, r"topk_length must have one entry per token \(3\), got 2"),
    ({"topk_length": [1, 2, 9]}, r"topk_length must be .*topk = 8\], got 9 at index 2"),
    ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
    ({"out": torch.zeros(3, 4, 64)}, r"out must have shape \[3, 4, 48\]"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=lambda x: str(x)[:40])
def test_what_is_refused(changes, message):
    arguments = {
        "q": torch.zeros(3, 4, 64),
        "kv": torch.zeros(9, 1, 64),
        "indices": torch.zeros(3, 8).int(),
        "sm_scale": 0.1,
        "d_v": 48,
        "out": torch.full((3, 4, 48), 7.0),
    }
    with pytest.raises(ValueError, match="flash_mla_sparse_fwd: .*" + message):
        cpattn.sparse.flash_mla_sparse_fwd(**arguments | changes)
    assert torch.all(arguments["out"] == 7)


@pytest.mark.parametrize(
    ("kv", "head_dim", "message"),
    [
        (torch.zeros(9, 1, 656).byte(), 512, "with FP8 rows q must have head dimension 576"),
        (torch.zeros(9, 1, 576).byte(), 576, r"kv must have shape \[rows, 1, 656\]"),
        (torch.zeros(9, 1, 657).byte()[..., :656], 576, "an even number of bytes apart, got 657"),
    ],
)
def test_fp8_rows_that_are_refused(kv, head_dim, message):
    q = torch.zeros(1, 2, head_dim, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        cpattn.sparse.flash_mla_sparse_fwd(q, kv, np.zeros((1, 4), np.int32), 0.1)
