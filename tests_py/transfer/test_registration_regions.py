# SPDX-License-Identifier: Apache-2.0
"""Memory that is registered, of lists with placeholders, repetitions and neighbours."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer import registration_regions

MiB = 1 << 20


def test_placeholders_and_repetitions_are_left_out():
    ptrs, lens = [300, 0, 100, 300, 100, 500], [10, 0, 10, 10, 20, 0]
    assert registration_regions(ptrs, lens) == ([100, 300], [20, 10])
    assert registration_regions([300, 0, 100, 300], [10, 0, 10, 10]) == ([300, 100], [10, 10])
    assert (ptrs, lens) == ([300, 0, 100, 300, 100, 500], [10, 0, 10, 10, 20, 0])
    assert registration_regions([], []) == registration_regions([0, 7], [0, 0]) == ([], [])
    assert registration_regions([], [], alignment=2 * MiB) == ([], [])


def test_ranges_that_meet_once_rounded_become_one():
    ptrs = [9 * MiB, 2 * MiB + 64, 2 * MiB + 512, 5 * MiB]
    lens = [64, 128, 64, 64]  # rounded: [8, 10), [2, 4), [2, 4), [4, 6)
    merged = registration_regions(ptrs, lens, alignment=2 * MiB)
    assert merged == ([2 * MiB + 64, 9 * MiB], [3 * MiB, 64])
    inside = registration_regions([100, 110], [100, 10], alignment=2)
    assert inside == ([100], [100])


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), max_size=8),
    st.sampled_from([2, 8, 32]),
)
def test_merged_ranges_cover_all_and_no_more_than_the_engine_rounds_to(regions, alignment):
    def rounded(begin, end):
        return set(range(begin // alignment, -(-end // alignment)))

    ptrs, lens = [ptr for ptr, _ in regions], [size for _, size in regions]
    addrs, sizes = registration_regions(ptrs, lens, alignment=alignment)
    merged = [(addr, addr + size) for addr, size in zip(addrs, sizes, strict=True)]
    for ptr, size in regions:
        assert not size or any(a <= ptr and ptr + size <= b for a, b in merged)
    blocks = [rounded(ptr, ptr + size) for ptr, size in regions if size]
    assert set().union(*(rounded(*range_) for range_ in merged)) == set().union(*blocks)
    for (_, end), (begin, _) in pairwise(merged):
        assert -(-end // alignment) < begin // alignment


@pytest.mark.parametrize(
    ("region", "rule"),
    [
        ((0, 1), r"ptrs and lens must be ranges of \[1, 2\^64\), got \(0, 1\) at 1"),
        ((2**64 - 8, 9), r"ptrs and lens must be ranges of \[1, 2\^64\), got \(184.*, 9\) at 1"),
        ((-1, 0), r"ptrs must be in \[0, 2\^64\), got -1 at index 1"),
        ((8, -1), r"lens must be in \[0, 2\^64\), got -1 at index 1"),
        ((8, 2**64), r"lens must be in \[0, 2\^64\), got 18446744073709551616 at index 1"),
    ],
)
@pytest.mark.parametrize("alignment", [1, 2 * MiB])
def test_regions_that_are_refused(region, rule, alignment):
    ptrs, lens = zip((64, 8), region, strict=True)
    with pytest.raises(ValueError, match=f"^registration_regions: {rule}"):
        registration_regions(ptrs, lens, alignment=alignment)
    with pytest.raises(ValueError, match="ptrs and lens must be equally many, got 2 and 1"):
        registration_regions([1, 2], [1], alignment=alignment)
    with pytest.raises(ValueError, match="alignment must be >= 1, got 0"):
        registration_regions([1], [1], alignment=0)


def test_arrays_become_plain_ints():
    regions = registration_regions(np.array([64, 8], np.uint64), np.array([8, 8], np.uint64))
    assert regions == ([64, 8], [8, 8])
    assert {type(number) for numbers in regions for number in numbers} == {int}


@pytest.mark.parametrize("alignment", [1, 2 * MiB])
def test_the_last_byte_of_the_address_space_may_be_registered(alignment):
    regions = ([2**64 - 8], [8])
    assert registration_regions(*regions, alignment=alignment) == regions
    with pytest.raises(ValueError, match="must be ranges of"):
        registration_regions([2**64 - 7], [8], alignment=alignment)
    assert registration_regions([1], [1], alignment=alignment) == ([1], [1])
