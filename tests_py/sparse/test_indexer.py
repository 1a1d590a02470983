# SPDX-License-Identifier: Apache-2.0
"""indexer_logits agrees with the oracle, and indexer_topk with a sort of its scores, with any
threads and in little memory; both refuse bad arguments."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from support.cases import strided_copy
from support.examples import examples
from support.sparse.indexer_batch import KEY_DTYPES, assert_logits, best_keys, make_inputs

SHAPES = [  # heads, dim
    (1, 64),
    (3, 128),
    (32, 64),
    (64, 128),
    (6, 32),
    (2, 256),
]


def assert_topk(inputs, topk):
    logits = cpattn.sparse.indexer_logits(**inputs)
    for in_order in (True, False):
        found = cpattn.sparse.indexer_topk(**inputs, topk=topk, sorted=in_order)
        np.testing.assert_array_equal(found, best_keys(logits, inputs, topk, in_order))


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_logits(isa, dtype, heads, dim):
    inputs = make_inputs(heads=heads, dim=dim, dtype=dtype)
    assert_logits(cpattn.sparse.indexer_logits(**inputs), inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("dim", [16, 48, 80])
def test_dimensions_that_fill_no_vector(isa, dtype, dim):
    inputs = make_inputs(dim=dim, dtype=dtype)
    assert_logits(cpattn.sparse.indexer_logits(**inputs), inputs)


@pytest.mark.parametrize("num_keys", [1, 31, 64, 65, 511, 512, 1057])
@pytest.mark.parametrize("num_queries", [1, 40])
def test_numbers_of_keys(isa, num_keys, num_queries):
    inputs = make_inputs(num_queries, num_keys, dtype="int8", scales=False)
    assert_logits(cpattn.sparse.indexer_logits(**inputs), inputs)
    assert_topk(inputs, 20)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("topk", [1, 7, 128, 300])
def test_topk(isa, dtype, topk):
    assert_topk(make_inputs(9, 1300, dtype=dtype), topk)


def test_topk_of_2048(isa):
    assert_topk(make_inputs(3, 6000, heads=1, dim=32), 2048)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(-5, 700)), min_size=1, max_size=70),
    st.integers(1, 80),
)
def test_any_ranges(ranges, topk):
    inputs = make_inputs(len(ranges), 700, heads=1, dim=16, dtype="int8")
    inputs["ks"], inputs["ke"] = zip(*ranges, strict=True)
    logits = np.asarray(cpattn.sparse.indexer_logits(**inputs))
    for row, (begin, end) in enumerate(ranges):
        outside = np.ones(700, bool)
        outside[begin : max(begin, end)] = False
        np.testing.assert_array_equal(np.isneginf(logits[row]), outside)
    assert_topk(inputs, topk)


def test_equal_scores_go_to_the_smaller_index(isa):
    inputs = make_inputs(5, 900, scales=False)
    inputs["k"][:] = inputs["k"][:1]
    inputs["k"][400:500] *= -1
    assert_topk(inputs, 450)
    inputs["q"][:] = 0
    np.testing.assert_array_equal(
        cpattn.sparse.indexer_topk(**inputs | {"ks": [3] * 5, "ke": [900] * 5}, topk=16),
        np.tile(np.arange(16), (5, 1)),
    )


def test_nan_reaches_the_logits_and_is_selected_last(isa):
    inputs = make_inputs(4, 200, dtype="float32") | {
        "ks": [0, 10, 0, 95],
        "ke": [200, 200, 110, 199],
    }
    bad = np.arange(100, 130)
    inputs["k"][bad, 5] = torch.nan
    logits = cpattn.sparse.indexer_logits(**inputs).numpy()
    expected = np.zeros((4, 200), bool)
    expected[:, bad] = True
    np.testing.assert_array_equal(np.isnan(logits), expected & ~np.isneginf(logits))
    assert_topk(inputs, 90)


def test_keys_that_nobody_sees_are_not_part_of_a_score(isa):
    inputs = make_inputs(3, 300, dtype="float32", scales=False) | {
        "ks": [40, 33, 60],
        "ke": [50, 70, 64],
    }
    seen = cpattn.sparse.indexer_logits(**inputs)
    inputs["k"][:33] = torch.nan
    inputs["k"][70:] = torch.inf
    assert torch.equal(cpattn.sparse.indexer_logits(**inputs), seen)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_a_score_depends_on_its_query_and_key_alone(isa, dtype):
    """A pair scores the same alone, among other queries, and at another place among the keys."""
    inputs = make_inputs(50, 700, heads=6, dim=32, dtype=dtype) | {"ks": [0] * 50, "ke": [700] * 50}
    logits = cpattn.sparse.indexer_logits(**inputs)
    for row in (0, 17, 49):
        alone = {n: inputs[n][row : row + 1] for n in ("q", "weights")} | {"ks": [333], "ke": [335]}
        np.testing.assert_array_equal(
            cpattn.sparse.indexer_logits(**inputs | alone)[0, 333:335], logits[row, 333:335]
        )
    moved = inputs | {n: inputs[n][35:] for n in ("k", "k_scale")} | {"ke": [665] * 50}
    np.testing.assert_array_equal(cpattn.sparse.indexer_logits(**moved), logits[:, 35:])


def test_forms_of_weights_and_scales():
    inputs = make_inputs()
    inputs["weights"] = inputs["weights"].bfloat16()
    logits = cpattn.sparse.indexer_logits(**inputs)
    assert_logits(logits, inputs)
    others = {
        "weights": strided_copy(inputs["weights"].float()[..., None]),
        "k_scale": inputs["k_scale"][:, None],
        "ks": inputs["ks"].astype(np.int32),
        "ke": inputs["ke"].tolist(),
    }
    assert torch.equal(cpattn.sparse.indexer_logits(**inputs | others), logits)


def test_nothing_to_do():
    for num_queries, num_keys in ((0, 20), (3, 0)):
        inputs = make_inputs(num_queries, num_keys)
        assert cpattn.sparse.indexer_logits(**inputs).shape == (num_queries, num_keys)
        assert np.all(np.asarray(cpattn.sparse.indexer_topk(**inputs, topk=4)) == -1)


@pytest.mark.parametrize("num_queries", [1, 20, 100])
def test_the_result_does_not_depend_on_the_number_of_threads(isa, num_queries):
    """Several threads each take a part of the keys if queries are few."""
    inputs = make_inputs(num_queries, 20000, heads=1, dim=32)
    inputs["k"][3000:17000] = inputs["k"][3000]  # ties among parts

    def results(num_threads):
        with cpattn.num_threads(num_threads):
            chosen = [cpattn.sparse.indexer_topk(**inputs, topk=k, sorted=k < 9) for k in (8, 2048)]
            return [cpattn.sparse.indexer_logits(**inputs), *chosen]

    expected = results(1)
    for num_threads in (2, 7):
        assert all(map(torch.equal, results(num_threads), expected))


BAD_ARGUMENTS = [
    ({"k": torch.zeros(333, 32).bfloat16()}, r"q must have .*dimension of the keys \(32\), got 64"),
    ({"k": torch.zeros(64, 333).bfloat16().T}, r"k must .*contiguous"),
    ({"q": torch.zeros(7, 0, 64).bfloat16()}, r"q must have 1 to 1024 heads, got 0"),
    ({"weights": torch.zeros(7, 2)}, r"weights must have .*\[7, 3\] or that and 1, got \[7, 2\]"),
    ({"weights": torch.zeros(7, 3, 2)}, r"weights must have shape \[7, 3\]"),
    ({"k_scale": torch.zeros(332)}, r"k_scale must have shape \[333\] or \[333, 1\], got \[332\]"),
    ({"ks": [0] * 6}, r"ks and ke must have one entry for each of 7 queries, got 6 and 7"),
    ({"ks": [0, 0, -1, 0, 0, 0, 0]}, r"ks must be >= 0, got -1 at index 2"),
    ({"ke": [0, 333, 334, 0, 0, 0, 0]}, r"ke must be at most the number of keys \(333\), got 334"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARGUMENTS)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cpattn.sparse.indexer_logits(**make_inputs(scales="k_scale" in changes) | changes)


@pytest.mark.parametrize(
    ("dim", "dtype", "multiple"),
    [(72, "bfloat16", 16), (272, "float32", 16), (48, "float8_e4m3fn", 32), (0, "int8", 16)],
)
def test_dimensions_that_are_refused(dim, dtype, multiple):
    inputs = make_inputs(dtype=dtype)
    inputs |= {n: torch.zeros(*inputs[n].shape[:-1], dim).to(inputs[n].dtype) for n in ("q", "k")}
    with pytest.raises(ValueError, match=rf"must be a multiple of {multiple} up to 256, got {dim}"):
        cpattn.sparse.indexer_topk(**inputs, topk=3)


@pytest.mark.parametrize("topk", [0, -1, 1 << 21])
def test_topk_out_of_range(topk):
    with pytest.raises(ValueError, match=rf"indexer_topk: topk must be .*, got {topk}"):
        cpattn.sparse.indexer_topk(**make_inputs(0), topk=topk)
