# SPDX-License-Identifier: Apache-2.0
"""Rows are written into pages of an engine, or of a pool of another library."""

import itertools
import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn import _core
from cpattn.kv import move_rows, write_pages
from support.examples import examples
from support.pairwise import pairwise

PAGES, PAGE_SIZE, HEADS, K_DIM, V_DIM = 7, 16, 3, 32, 48
DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def make_pages(dtype, dim):
    """Return [pages, heads, page_size, dim]: every other page and slot of a larger array."""
    whole = np.zeros((2 * PAGES, HEADS, 2 * PAGE_SIZE, dim + 16), DTYPES[dtype])
    return whole[::2, :, PAGE_SIZE:, 8 : dim + 8]


def make_rows(count, dtype, seed=0):
    """Return keys and values, side by side in a larger array."""
    rng = np.random.default_rng(seed)
    fused = rng.standard_normal((count, 5 + HEADS * (K_DIM + V_DIM))).astype(DTYPES[dtype])
    k, v = np.split(fused[:, 5:], [HEADS * K_DIM], axis=1)
    return k.reshape(count, HEADS, K_DIM), v.reshape(count, HEADS, V_DIM)


def nearest(rows, dtype, scale):
    most = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    return np.clip(rows.astype(np.float32) / np.float32(scale), -most, most).astype(DTYPES[dtype])


FORMATS = [(a, b) for a, b in product([*DTYPES][:3], DTYPES) if a == b or "8" in b]


#: Views of pages [pages, heads, page_size, dim] in each layout.
LAYOUTS = {"HND": lambda pages: pages, "NHD": lambda pages: pages.swapaxes(1, 2)}


@pytest.mark.parametrize(
    ("formats", "count", "num_threads", "kv_layout"),
    pairwise(FORMATS, [5, 3000], [1, 3], [*LAYOUTS]),
)
def test_the_last_row_of_a_slot_is_kept(formats, count, num_threads, kv_layout, isa):
    dtype, kept = formats
    k, v = make_rows(count, dtype)
    slots = np.random.default_rng(1).integers(-1, PAGES * PAGE_SIZE, count)
    scales = (1.0, 1.0) if dtype == kept else (0.3, 2.5)
    k_pages, v_pages = make_pages(kept, K_DIM), make_pages(kept, V_DIM)
    before = _core.default_num_threads()
    _core.set_num_threads(num_threads)
    try:
        given = zip((k, v), map(LAYOUTS[kv_layout], (k_pages, v_pages)), strict=True)
        scaled = {"k_scale": scales[0], "v_scale": scales[1]}
        write_pages(slots, *itertools.chain(*given), kv_layout=kv_layout, **scaled)
    finally:
        _core.set_num_threads(before)
    for pages, rows, scale in ((k_pages, k, scales[0]), (v_pages, v, scales[1])):
        expected = np.zeros_like(pages)
        for row, slot in zip(nearest(rows, kept, scale), slots, strict=True):
            if slot >= 0:
                expected[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = row
        np.testing.assert_array_equal(pages.view(np.uint8), expected.view(np.uint8))
        outside = pages.base.copy()
        outside[::2, :, PAGE_SIZE:, 8:-8] = 0
        assert not outside.any()


def arguments(**changes):
    k, v = make_rows(4, "float32")
    pages = {f"{x}_pages": make_pages("float8_e4m3fn", n) for x, n in (("k", K_DIM), ("v", V_DIM))}
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    return {"slots": [0, 1, -1, 5], "k": k, "v": v, **pages, **scales, "kv_layout": "HND"} | changes


LAST = PAGES * PAGE_SIZE
WRONG = {
    f"slots must be in [-1, {LAST}), got {LAST} at index 1": {"slots": [0, LAST, 1, 2]},
    f"slots must be in [-1, {LAST}), got -2 at index 0": {"slots": [-2, 0, 1, 2]},
    "k must have shape [3, 3, 32], got [4, 3, 32]": {"slots": [0, 1, 2]},
    "v must have shape [4, 3, 48], got [4, 3, 32]": {"v": make_rows(4, "float32")[0]},
    "k_scale must be a positive number, got 0": {"k_scale": 0.0},
    "v_scale must be a positive number, got nan": {"v_scale": math.nan},
    "v_pages must have as many pages": {"v_pages": make_pages("float16", V_DIM)[1:]},
    "k must be float32, float16 or bfloat16, got float8_": {"k": make_rows(4, "float8_e5m2")[0]},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_written(message):
    given = arguments(**WRONG[message])
    with pytest.raises((ValueError, TypeError)) as caught:
        write_pages(**given)
    assert f"write_pages: {message}" in str(caught.value)
    assert not given["k_pages"].astype(np.float32).any()
    assert not given["v_pages"].astype(np.float32).any()


def test_rows_may_not_lie_in_pages():
    pages = make_pages("float32", K_DIM)
    v, v_pages = pages[0, :, :4].transpose(1, 0, 2), make_pages("float32", K_DIM)
    with pytest.raises(ValueError, match="write_pages: k_pages must not overlap v in memory"):
        write_pages(**arguments(k_pages=pages, v=v, v_pages=v_pages))


def test_slots_without_pages():
    k, v = make_rows(4, "float32")
    k_slots, v_slots = (np.zeros((9, HEADS, dim), np.float32) for dim in (K_DIM, V_DIM))
    write_pages([8, -1, 0, 3], k, k_slots, v, v_slots)
    for slots, rows in ((k_slots, k), (v_slots, v)):
        np.testing.assert_array_equal(slots[[8, 0, 3]], rows[[0, 2, 3]])
        assert np.count_nonzero(slots.any(axis=(1, 2))) == 3


@pytest.mark.parametrize("kv_layout", [*LAYOUTS])
@given(
    pairs=st.lists(st.tuples(*[st.integers(-1, PAGES * PAGE_SIZE - 1)] * 2), max_size=40),
    crowded=st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_move_all_at_once(pairs, crowded, kv_layout):
    """Results of chains, cycles and rows to several slots are as if all rows were read first."""
    if crowded:  # few slots make nearly all moves depend on others
        pairs = [(source % 8, target % 8) for source, target in pairs]
    pairs = [*{target: (source, target) for source, target in pairs}.values()]
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    caches, expected = [], []
    for dtype, dim in (("float32", K_DIM), ("float8_e5m2", V_DIM)):
        pages = make_pages(dtype, dim)
        pages[...] = np.random.default_rng(dim).standard_normal(pages.shape).astype(pages.dtype)
        rows = pages.swapaxes(1, 2).reshape(PAGES * PAGE_SIZE, HEADS, dim)
        moved = rows.copy()
        for source, target in pairs:
            if min(source, target) >= 0:
                moved[target] = rows[source]
        caches.append(pages)
        expected.append(moved)
    move_rows(sources, targets, [LAYOUTS[kv_layout](x) for x in caches], kv_layout=kv_layout)
    for pages, moved in zip(caches, expected, strict=True):
        found = pages.swapaxes(1, 2).reshape(moved.shape)
        assert np.array_equal(found.view(np.uint8), moved.view(np.uint8))


CACHE = np.arange(8, dtype=np.float32).reshape(4, 1, 2)
#: Rows and pages have gaps, and a step of a page is no multiple of that of a row.
PADDED = np.zeros((8, 135), np.float32)[:, :120].reshape(8, 4, 1, 30)[..., :10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": [4]}, r"sources must be in \[-1, 4\), got 4 at index 0"),
        ({"targets": [-2]}, r"targets must be in \[-1, 4\), got -2 at index 0"),
        ({"sources": [0, 1]}, "sources and targets must have the same length, got 2 and 1"),
        ({"sources": [0, 1], "targets": [2, 2]}, "targets must differ, got 2 again at index 1"),
        ({"caches": [CACHE, CACHE]}, r"caches\[1\] must not have rows of caches\[0\]"),
        ({"caches": [CACHE, CACHE[1:]]}, r"caches\[1\] must not have rows of caches\[0\]"),
        ({"caches": [PADDED, PADDED[1:]]}, r"caches\[1\] must not have rows of caches\[0\]"),
        ({"caches": [CACHE, CACHE[:2].copy()]}, r"sources must be in \[-1, 2\), got 3"),
        ({"caches": [CACHE[0]]}, r"caches\[0\] must have 4 dimensions"),
    ],
)
def test_moves_that_cannot_be_are_refused(changes, message):
    arguments = {"sources": [3], "targets": [2], "caches": [CACHE]} | changes
    with pytest.raises(ValueError, match=f"^move_rows: {message}"):
        move_rows(**arguments)
    assert np.array_equal(CACHE.ravel(), np.arange(8))


def test_keys_and_values_of_one_allocation_are_moved():
    for pair in (np.ones((0, 1, 2)), np.ones((4, 1, 0))):
        move_rows([], [], [pair, pair.copy()])
    for axis in range(4):  # place of the axis of K and V among [pages, tokens, heads, dim]
        both = np.arange(2.0 * 3 * 4 * 5 * 6).reshape(*(3, 4, 5, 6)[:axis], 2, *(3, 4, 5, 6)[axis:])
        keys, values = np.moveaxis(both, axis, 0)
        before = keys.copy(), values.copy()
        move_rows([0, 7], [7, 0], [keys, values])
        for now, then in zip((keys, values), before, strict=True):
            assert np.array_equal(now[0, 0], then[1, 3])
            assert np.array_equal(now[1, 3], then[0, 0])
