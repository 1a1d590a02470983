# SPDX-License-Identifier: Apache-2.0
"""Tokens to pages, pages to groups, chunks of a prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import (
    KVSendCursor,
    group_concurrent_contiguous,
    kv_to_page_indices,
    kv_to_page_num,
)

INT32_MAX = 2**31 - 1


@given(st.lists(st.integers(0, 500), unique=True, max_size=20), st.integers(1, 9), st.data())
def test_pages_of_slots(pages, page_size, data):
    slots = [page * page_size + row for page in pages for row in range(page_size)]
    missing = data.draw(st.integers(0, page_size - 1)) if slots else 0
    slots = slots[: len(slots) - missing]
    assert kv_to_page_indices(slots, page_size).tolist() == pages
    for dtype in (np.int32, np.int64):
        found = kv_to_page_indices(np.repeat(np.array(slots, dtype), 2)[::2], page_size)
        assert found.tolist() == pages
        assert found.dtype == np.int32
    assert kv_to_page_num(len(slots), page_size) == len(pages)


def groups(src, dst):
    """The definition, with a comparison where the library counts."""
    together = []
    for pair in zip(src, dst, strict=True):
        if together and pair == tuple(index + 1 for index in together[-1][-1]):
            together[-1].append(pair)
        else:
            together.append([pair])
    return [[s for s, _ in g] for g in together], [[d for _, d in g] for g in together]


near = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30)
ascending = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, -1, 0]), st.integers(1, 2))).map(
    lambda steps: list(np.cumsum([(100, INT32_MAX - 99), *steps], axis=0))
)


@given(near | ascending)
def test_groups_are_those_of_the_definition(pairs):
    src, dst = [int(s) for s, _ in pairs], [int(d) for _, d in pairs]
    expected = groups(src, dst)
    assert group_concurrent_contiguous(src, dst) == expected
    assert group_concurrent_contiguous(np.array(src, np.int64), tuple(dst)) == expected
    if pairs:
        assert group_concurrent_contiguous(src, []) == group_concurrent_contiguous([], dst)
        assert group_concurrent_contiguous(src, []) == ([], [])


def cursor(num_tokens=8, page_size=4, **options):
    return KVSendCursor(num_tokens, page_size, **options)


WHOLE, PAGE = cursor(12).advance(12, last_chunk=True), "page_size must be >= 1, got"
SHORT = r"pages \[0, 3\).*got {} of the source and 2 of the"
EQUAL = "group_concurrent_contiguous requires equal-length src/dst index arrays, got"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_to_page_indices([1], 0), f"{PAGE} 0"),
        (lambda: kv_to_page_num(3, -4), f"{PAGE} -4"),
        (lambda: kv_to_page_num(-1, 4), "num_tokens must be >= 0, got -1"),
        (lambda: group_concurrent_contiguous([1], [1, 2]), f"{EQUAL} 1 and 2"),
        (lambda: group_concurrent_contiguous([1] * 5, [1] * 2), f"{EQUAL} 5 and 2"),
        (lambda: cursor(-1), "^KVSendCursor: num_tokens must be >= 0, got -1"),
        (lambda: cursor(decode_prefix_len=-1), "decode_prefix_len must be >= 0, got -1"),
        (lambda: cursor(decode_prefix_len=9), "decode_prefix_len must be within the 8 tokens, got"),
        (lambda: cursor(decode_prefix_len=6), "must be a multiple of page_size 4, got 6"),
        (lambda: cursor().advance(-5), "KVSendCursor.advance: num_computed must be >= 0, got -5"),
        (lambda: cursor().advance(8, end=9), "end must be within the 8 tokens, got 9"),
        (lambda: cursor().advance(8, end=-1), "end must be >= 0, got -1"),
        # Slices end where lists do: as many pages on both sides are not yet all of them.
        (lambda: WHOLE.select([*range(12)], [5, 6]), SHORT.format(3)),
        (lambda: WHOLE.select(list(range(8)), [5, 6]), SHORT.format(2)),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_compat_goes_on_as_engines_do():
    """A destination may be short of pages; a prefix may end in a page, whose rest is never sent."""
    src, dst = cursor(12, compat=True).advance(12, last_chunk=True).select([*range(12)], [5, 6])
    assert (src.tolist(), dst) == ([0, 1], [5, 6])
    chunk = cursor(10, decode_prefix_len=2, compat=True).advance(10, last_chunk=True)
    assert chunk.select([*range(10)], [0, 1])[0].tolist() == [0, 1]


@given(
    num_pages=st.integers(0, 12),
    tail=st.integers(0, 7),
    page_size=st.integers(1, 8),
    data=st.data(),
)
def test_chunks_send_every_page_once(num_pages, tail, page_size, data):
    """Pages of all chunks one after the other are the request's, prefix excluded."""
    num_tokens = num_pages * page_size + tail % page_size
    prefix = data.draw(st.integers(0, num_tokens // page_size)) * page_size
    computed = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=6)))
    slots = np.arange(1000 * page_size, 1000 * page_size + num_tokens)
    dst_pages = np.arange(kv_to_page_num(num_tokens - prefix, page_size)) + 7
    cursor = KVSendCursor(num_tokens, page_size, decode_prefix_len=prefix)
    sent = []
    for count in computed:
        chunk = cursor.advance(count)
        if chunk is None:
            assert count - count % page_size <= cursor.start_send_idx
            continue
        assert chunk.token_end == count - count % page_size
        assert chunk.is_last == (chunk.token_end == num_tokens)
        sent.append(chunk)
    sent.append(cursor.advance(num_tokens, last_chunk=True))
    assert sent[-1].is_last
    assert cursor.start_send_idx == num_tokens
    pairs = [chunk.select(slots, dst_pages) for chunk in sent]
    src = [page for pages, _ in pairs for page in pages.tolist()]
    dst = [page for _, pages in pairs for page in pages.tolist()]
    assert src == list(
        range(1000 + prefix // page_size, 1000 + kv_to_page_num(num_tokens, page_size))
    )
    assert dst == dst_pages.tolist()


def test_a_partial_page_waits():
    cursor = KVSendCursor(130, 64)
    assert cursor.advance(63) is None
    first = cursor.advance(100)
    assert (first.token_start, first.token_end, first.page_start, first.page_end) == (0, 64, 0, 1)
    last = cursor.advance(500, last_chunk=True)  # tokens already generated are not the prompt's
    assert (last.token_start, last.token_end, last.page_start, last.page_end) == (64, 130, 1, 3)
    cursor = KVSendCursor(16, 4)
    assert cursor.advance(16, end=9).token_end == 8
    assert cursor.advance(16, end=4) is None
    assert cursor.advance(16, end=16).token_end == 16
    all_cached = KVSendCursor(8, 4, decode_prefix_len=8).advance(8, last_chunk=True)
    assert all_cached.is_last  # carries the metadata
    assert all_cached.page_start == all_cached.page_end == 0
    assert KVSendCursor(0, 1).advance(0) is None
    assert KVSendCursor(0, 1).advance(0, last_chunk=True).is_last
