# SPDX-License-Identifier: Apache-2.0
"""The oracle agrees with hand-computed values and torch's float64 attention."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cpattn
from cpattn import reference
from support.tolerances import assert_close, to_float64


def assert_same(actual, expected):
    """Compare with another computation of normal numbers in float64."""
    assert_close(actual, to_float64(expected), 1, "restated", "float64")


def single_page(x):
    """Return [tokens, heads, dim] as a cache of one page."""
    return np.ascontiguousarray(x)[None]


def attend(q, k, v, **options):
    return reference.paged_attention(
        q,
        single_page(k),
        single_page(v),
        q_lens=[len(q)],
        kv_lens=[len(k)],
        block_tables=[[0]],
        **options,
    )


def scores_to_qk(scores):
    """Return q and k of one token, one head and dimension 1 with the products `scores`."""
    return np.ones((1, 1, 1)), np.reshape(np.array(scores, float), (-1, 1, 1))


def test_a_sink_is_in_the_denominator_only():
    q, k = scores_to_qk([math.log(2), math.log(8)])
    v = np.array([0.0, 10.0]).reshape(2, 1, 1)
    for sink, expected in [(math.log(10), 4.0), (-math.inf, 8.0), (math.inf, 0.0)]:
        out, lse = attend(q, k, v, scale=1.0, sinks=np.array([sink]))
        assert out.item() == pytest.approx(expected)
        assert lse.item() == pytest.approx(math.log(10))


def test_softcap_comes_after_the_scale():
    q, k = scores_to_qk([0.0, 3.0])
    _, lse = attend(q, k, np.ones((2, 1, 1)), scale=2.0, softcap=5.0)
    assert lse.item() == pytest.approx(math.log(1 + math.exp(5 * math.tanh(6 / 5))))


def test_a_window_counts_keys_before_the_query():
    q = np.zeros((3, 1, 1))
    k, v = np.zeros((5, 1, 1)), np.arange(5.0).reshape(5, 1, 1)
    assert attend(q, k, v)[0].ravel() == pytest.approx([1.0, 1.5, 2.0])
    assert attend(q, k, v, window=0)[0].ravel() == pytest.approx([2.0, 3.0, 4.0])
    assert attend(q, k, v, window=1)[0].ravel() == pytest.approx([1.5, 2.5, 3.5])
    assert attend(q, k, v, window=(0, 1), causal=False)[0].ravel() == pytest.approx([2.5, 3.5, 4.0])
    assert attend(q, k, v, window=(None, 0), causal=False)[0].ravel() == pytest.approx(
        attend(q, k, v)[0].ravel()
    )


def test_queries_before_the_first_key_give_zeros_and_minus_infinity():
    q, k, v = np.ones((3, 1, 1)), np.ones((1, 1, 1)), np.full((1, 1, 1), 7.0)
    out, lse = attend(q, k, v, allow_short_kv=True)
    assert out.ravel().tolist() == [0, 0, 7]
    assert np.isneginf(lse).ravel().tolist() == [True, True, False]
    with pytest.raises(ValueError, match=r"kv_lens must be at least q_lens .* got 1 for 3"):
        attend(q, k, v)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["NHD", "HND", "3-D"])
def test_pages_heads_and_dtypes_against_torch(layout, dtype):
    rng = np.random.default_rng(0)
    q_lens, kv_lens, page_size = [3, 0, 4], [9, 5, 4], 4
    k_cache = rng.standard_normal((8, page_size, 2, 6)).astype(dtype)
    v_cache = rng.standard_normal((8, page_size, 2, 5)).astype(dtype)
    q = rng.standard_normal((7, 6, 6)).astype(dtype)
    tables = np.array([[5, 0, 3], [2, 7, -1], [5, 1 << 30, -1]], np.int32)
    forms = {
        "NHD": lambda x: x,
        "HND": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)),
        "3-D": lambda x: x.reshape(-1, *x.shape[2:]),
    }
    out, lse = reference.paged_attention(
        q,
        forms[layout](k_cache),
        forms[layout](v_cache),
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_tables=tables,
        page_size=page_size,
        kv_layout="HND" if layout == "HND" else "NHD",
    )
    assert out.dtype == lse.dtype == np.float64
    row = 0
    for q_len, kv_len, table in zip(q_lens, kv_lens, tables, strict=True):
        pages = table[: -(-kv_len // page_size)]
        k, v = (torch.from_numpy(c[pages].astype(np.float64)) for c in (k_cache, v_cache))
        k, v = (x.flatten(0, 1)[:kv_len].transpose(0, 1) for x in (k, v))
        rows = torch.from_numpy(q[row : row + q_len].astype(np.float64)).transpose(0, 1)
        visible = torch.ones(q_len, kv_len).tril(kv_len - q_len).bool()
        expected = F.scaled_dot_product_attention(rows, k, v, attn_mask=visible, enable_gqa=True)
        scores = rows @ k.repeat_interleave(3, 0).transpose(1, 2) / math.sqrt(6)
        expected_lse = scores.masked_fill(~visible, -math.inf).logsumexp(-1)
        assert_same(out[row : row + q_len], expected.transpose(0, 1))
        assert_same(lse[row : row + q_len], expected_lse.T)
        row += q_len


def test_a_custom_mask_narrows_causal_attention():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((n, 2, 4)) for n in (3, 5, 5))
    mask = rng.random((3, 5)) < 0.5
    mask[:, 0] = True
    for causal in (True, False):
        visible = mask & np.tri(3, 5, 2, dtype=bool) if causal else mask
        out, _ = attend(q, k, v, causal=causal, custom_mask=mask.ravel())
        expected = F.scaled_dot_product_attention(
            *(torch.from_numpy(x).transpose(0, 1) for x in (q, k, v)),
            attn_mask=torch.from_numpy(visible),
        )
        assert_same(out, expected.transpose(0, 1))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("key", [-np.inf, -1e30])
def test_a_value_counts_under_weight_0(isa, key, value):
    """The product of 0 and infinity is NaN."""
    q, k, v = (np.ones((n, 1, 16), np.float32) for n in (1, 4, 4))
    k[1, 0, 0], v[1] = key, value
    arguments = {"q_lens": [1], "kv_lens": [4], "block_tables": np.zeros((1, 1), np.int32)}
    out = cpattn.paged_attention(q, k[None], v[None], **arguments)
    oracle, lse = reference.paged_attention(q, k[None], v[None], **arguments)
    assert np.isnan(out).all()
    assert np.isnan(oracle).all()
    assert np.isfinite(lse).all()


def test_merge_state_golden_value():
    out, lse = reference.merge_state(
        np.array(0.0).reshape(1, 1, 1),
        np.log([[2.0]]),
        np.array(10.0).reshape(1, 1, 1),
        np.log([[8.0]]),
    )
    assert out.item() == pytest.approx(8.0)
    assert lse.item() == pytest.approx(math.log(10))


def test_merge_state_ignores_empty_parts():
    full, nan = np.full((1, 1, 3), 2.0), np.full((1, 1, 3), np.nan)
    some, none = np.array([[1.5]]), np.array([[-np.inf]])
    for arguments in [(full, some, nan, none), (nan, none, full, some)]:
        out, lse = reference.merge_state(*arguments)
        assert out.tolist() == full.tolist()
        assert lse.item() == 1.5
    out, lse = reference.merge_state(nan, none, nan, none)
    assert out.tolist() == [[[0, 0, 0]]]
    assert lse.item() == -math.inf
    out, lse = reference.merge_state(nan[..., :0], some, nan[..., :0], some)
    assert out.shape == (1, 1, 0)
    assert lse.item() == pytest.approx(1.5 + math.log(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, r"window must be >= 0 \(0: a token sees itself\), got -1"),
        ({"kv_layout": "BSHD"}, "kv_layout must be 'NHD' or 'HND', got 'BSHD'"),
        ({"page_size": 8}, r"k_cache must have pages of page_size = 8, got shape \[3, 4, 1, 2\]"),
        ({"page_size": 0}, r"page_size must be in \[1, 2147483647\], got 0"),
        ({"kv_lens": [5, 5]}, "the same number of sequences, got 1, 2 and 1"),
        ({"kv_lens": [-1]}, "lengths must be >= 0 .*, got q_len 2 and kv_len -1 at index 0"),
        ({"kv_lens": [9]}, "block_tables must have 3 columns for kv_len 9 at index 0, got 2"),
        ({"block_tables": [[1, 3]]}, r"block_tables\[0, 1\] must be a page id below 3, got 3"),
        ({"q_lens": [3]}, r"q must be \[3, a multiple of 1, 2\] .* got \[2, 1, 2\]"),
        ({"sinks": np.zeros(3)}, r"sinks must be \[1\]"),
        ({"custom_mask": np.ones(9, bool)}, "custom_mask must be 10 contiguous bools"),
        ({"k_cache": np.ones((3, 4, 1, 2), np.int32)}, "must be a floating-point type, got int32"),
        (dict.fromkeys(("k_cache", "v_cache"), np.ones((12, 1, 2))), "a 3-D cache needs page_size"),
    ],
)
def test_errors_name_argument_rule_and_value(change, message):
    arguments = {
        "q": np.ones((2, 1, 2)),
        "k_cache": np.ones((3, 4, 1, 2)),
        "v_cache": np.ones((3, 4, 1, 2)),
        "q_lens": [2],
        "kv_lens": [5],
        "block_tables": [[1, 2]],
    } | change
    with pytest.raises(ValueError, match=message):
        reference.paged_attention(**arguments)


def test_merge_state_refuses_unequal_shapes():
    a, b, lse = np.zeros((2, 3, 4)), np.zeros((2, 3, 5)), np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"out_b and lse_b must be \[2, 3, 4\] and \[2, 3\], got"):
        reference.merge_state(a, lse, b, lse)


def test_sparse_mla_refuses_lengths_beyond_its_indices():
    q, kv = np.ones((2, 1, 4)), np.ones((3, 1, 4))
    for length in (-1, 6):
        with pytest.raises(ValueError, match=rf"must be in \[0, 5\], got {length} at index 1"):
            reference.flash_mla_sparse_fwd(
                q, kv, np.zeros((2, 5), np.int64), 1.0, d_v=4, topk_length=[5, length]
            )
    with pytest.raises(ValueError, match=r"indices must be \[s_q, 1, topk\]"):
        reference.flash_mla_sparse_fwd(q, kv, np.ones((2, 0, 1), np.int32), 1.0, d_v=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(8), np.ones(8), 0.1), r"x must be two-dimensional .* got shape \[8\]"),
        ((np.ones((2, 8)), np.ones(4), 0.1), r"weight must be contiguous \[8\], got shape \[4\]"),
        ((np.ones((2, 8)), np.ones(16)[::2], 0.1), "weight must be contiguous"),
        ((np.ones((2, 8)), np.ones(8), -1.0), "eps must be >= 0, got -1"),
        ((np.ones((2, 8)), np.ones(8), 0.1, np.ones((8, 8))), r"bias must be contiguous \[8\]"),
    ],
)
def test_rms_norm_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=r"reference\.rms_norm: " + message):
        reference.rms_norm(*arguments)


def test_rows_without_elements_are_not_counted_one_by_one():
    empty = np.empty((2**31, 0), np.float32)
    with pytest.raises(ValueError, match="x must have a power of two columns"):
        reference.hadamard_transform(empty)
    assert reference.rms_norm(empty, np.ones(0), eps=1.0).shape == empty.shape
    with pytest.raises(ValueError, match="out_a must have 3 dimensions"):
        reference.merge_state(*(np.ones((2, 2)),) * 4)


CODES = {
    "float8_e4m3fn": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    "int8": (torch.int8, np.int8),
}


@pytest.mark.parametrize("code", CODES)
def test_every_code_by_two_other_libraries(code):
    """The result for one key is the value itself, for each code."""
    torch_dtype, numpy_dtype = CODES[code]
    codes = np.arange(256).astype(np.uint8).reshape(1, 1, 1, 256)
    expected = codes.view(numpy_dtype).astype(np.float64).ravel()
    wanted = torch.from_numpy(codes).view(torch_dtype).double().numpy().ravel()
    np.testing.assert_array_equal(expected, wanted)
    q, keys = np.zeros((1, 1, 1)), np.zeros((1, 1, 1, 1), np.uint8)
    batch = {"q_lens": [1], "kv_lens": [1], "block_tables": [[0]]}
    out, _ = reference.paged_attention(q, keys, codes, **batch, kv_dtype=code)
    np.testing.assert_array_equal(out.ravel(), expected)
    for view in (lambda x: x.view(numpy_dtype), lambda x: torch.from_numpy(x).view(torch_dtype)):
        out, _ = reference.paged_attention(q, view(keys), view(codes), **batch)
        np.testing.assert_array_equal(out.ravel(), expected)


@pytest.mark.parametrize("layout", ["NHD", "HND", "3-D"])
@pytest.mark.parametrize("code", CODES)
def test_scales_multiply_what_codes_stand_for(code, layout):
    """A code times a float32 is exact in float64, so results have equal bits."""
    rng = np.random.default_rng(0)
    numpy_dtype = CODES[code][1]
    shape = {"NHD": (3, 4, 2, 6), "HND": (3, 2, 4, 6), "3-D": (12, 2, 6)}[layout]
    codes = rng.integers(0, 120, (2, *shape)).astype(np.uint8).view(numpy_dtype)
    heads = (rng.random(2) + 0.5).astype(np.float32)
    by_head = heads[:, None, None] if layout == "HND" else heads[:, None]
    tokens = (rng.random(shape[:-1]) + 0.5).astype(np.float32)
    batch = {"q_lens": [3, 0, 4], "kv_lens": [8, 0, 4], "page_size": 4, "scale": 0.01}
    batch |= {"block_tables": [[2, 0], [-1, -1], [1, 9]]}
    batch |= {"kv_layout": "HND" if layout == "HND" else "NHD"}
    q = rng.standard_normal((7, 4, 6))
    k, v = codes.astype(np.float64)
    kinds = [(0.7, 0.7), (np.float32([0.5]), 0.5), (heads, by_head), (tokens, tokens[..., None])]
    for scale, factor in kinds:
        expected = reference.paged_attention(q, k * factor, v * (2.0 * factor), **batch)
        result = reference.paged_attention(q, *codes, **batch, k_scale=scale, v_scale=2 * scale)
        for actual, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(actual, wanted)


REFUSED_SCALES = [
    ({"k_scale": 0.0}, ValueError, "k_scale must be positive and finite, got 0"),
    ({"v_scale": math.nan}, ValueError, "v_scale must be positive and finite, got nan"),
    ({"k_scale": np.float32([1, -1])}, ValueError, "k_scale must be positive and finite, got -1"),
    ({"v_scale": np.ones(3)}, ValueError, r"v_scale must have 1 or 2 numbers, got shape \[3\]"),
    ({"k_scale": np.ones((3, 4, 1))}, ValueError, "k_scale must have a number for each token"),
    ({"k_scale": np.ones((2, 2, 2, 2))}, ValueError, "k_scale must be a number, "),
    ({"k_scale": np.ones(2, np.int8)}, ValueError, "k_scale must be a floating-point type"),
    ({"v_scale": "1"}, TypeError, "v_scale must be a tensor"),
    ({"kv_dtype": "fp8"}, ValueError, "kv_dtype must be 'float8_e4m3fn', 'float8_e5m2' or 'int8'"),
    ({"kv_dtype": "float8_e5m2"}, ValueError, "k_cache must be float8_e5m2, as kv_dtype says"),
    ({"v_cache": np.zeros((3, 4, 2, 6), np.uint8)}, ValueError, "v_cache of uint8 needs kv_dtype"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED_SCALES, ids=lambda x: str(x)[:30])
def test_scales_and_codes_that_do_not_fit(options, error, message):
    codes = np.zeros((3, 4, 2, 6), np.int8)
    arguments = {"k_cache": codes, "v_cache": codes} | options
    with pytest.raises(error, match=f"reference.paged_attention: {message}"):
        reference.paged_attention(
            np.ones((1, 4, 6)), **arguments, q_lens=[1], kv_lens=[8], block_tables=[[2, 0]]
        )
