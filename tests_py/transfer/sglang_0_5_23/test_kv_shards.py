# SPDX-License-Identifier: Apache-2.0
"""What a rank sends that holds every N-th page, or divides pages or layers with others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer import (
    KVSender,
    filter_kv_indices_for_cp_rank,
    filter_kv_indices_for_shard_rank,
    get_layer_owner,
    get_layer_shard_range,
    is_elided_entry,
)

SHARD = "filter_kv_indices_for_shard_rank"
CP = "filter_kv_indices_for_cp_rank"


@given(st.lists(st.integers(0, 2**31 - 1), max_size=30), st.integers(0, 50), st.integers(1, 9))
def test_every_page_is_sent_by_its_owner(pages, start, size):
    sent = {}
    for rank in range(size):
        local, positions = filter_kv_indices_for_shard_rank(
            kv_indices=pages,
            index_slice=slice(start, start + len(pages)),
            shard_rank=rank,
            shard_size=size,
        )
        assert (local.dtype, positions.dtype) == (np.int32, np.int64)
        assert positions.tolist() == sorted(positions.tolist())
        for page, position in zip(local.tolist(), positions.tolist(), strict=True):
            assert position not in sent
            sent[position] = page * size + rank
    assert [sent[start + i] for i in range(len(pages))] == pages


def call_shard(pages, chunk, rank=1, size=2):
    return filter_kv_indices_for_shard_rank(
        kv_indices=pages, index_slice=chunk, shard_rank=rank, shard_size=size
    )


def test_striped_pages_of_arrays():
    pages = np.repeat(np.array([8, 9, 13], np.int32), 2)[::2]
    local, positions = call_shard(pages, slice(np.int64(2), np.int64(5), 1))
    assert (local.tolist(), positions.tolist()) == ([4, 6], [3, 4])
    local, positions = call_shard([8, 10], slice(0, 2))
    assert (len(local), len(positions)) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "rule"),
    [
        (([1, 2], slice(0, 3)), ValueError, r"kv_indices must be the 3 pages .*\[0, 3\), got 2"),
        (([1, -2], slice(0, 2)), ValueError, "kv_indices must be >= 0, got -2 at index 1"),
        (([1], slice(-1, 0)), ValueError, r"0 <= start <= stop, got \[-1, 0\)"),
        (([], slice(2, 1)), ValueError, r"0 <= start <= stop, got \[2, 1\)"),
        (([1], slice(0, 1, 2)), ValueError, "index_slice must have no step, got 2"),
        (([1], slice(0, 1), 2), ValueError, r"shard_rank must be in \[0, 2\) of shard_size, got 2"),
        (([1], slice(0, 1), 0, 0), ValueError, "shard_size must be >= 1, got 0"),
        (([2**33], slice(0, 1), 0), ValueError, "local pages must fit into int32, got 4294967296"),
        (([1], [0]), TypeError, "index_slice must be a slice, got list"),
        (([1], slice(None, 1)), TypeError, "index_slice.start must be an integer, got NoneType"),
        (([1], slice(0, None)), TypeError, "index_slice.stop must be an integer, got NoneType"),
        (([1], slice(0, 1, "1")), TypeError, "index_slice.step must be an integer, got str"),
        (([1.0], slice(0, 1)), TypeError, "kv_indices"),
        (([1], slice(0, 1), "1"), TypeError, "shard_rank must be an integer, got str"),
    ],
)
def test_striped_pages_refused(arguments, error, rule):
    with pytest.raises(error, match=f"^{SHARD}: .*{rule}"):
        call_shard(*arguments)


def share_of(total, rank, size):
    """The definition: pages are dealt out in order, one more to each of the first ranks."""
    sizes = [len(range(r, total, size)) for r in range(size)]
    return range(sum(sizes[:rank]), sum(sizes[: rank + 1]))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60), st.integers(2, 6))
def test_ranks_divide_the_pages_of_a_transfer(start, num_pages, total, size):
    pages = [1000 + i for i in range(num_pages)]
    for rank in range(size):
        found, where = filter_kv_indices_for_cp_rank(
            KVSender(rank, size), pages, slice(start, start + num_pages), total
        )
        wanted = [i for i in range(start, start + num_pages) if i in share_of(total, rank, size)]
        assert found == [pages[i - start] for i in wanted]
        expected = slice(wanted[0], wanted[-1] + 1) if wanted else slice(start, start)
        assert where == expected


def test_open_slices_go_to_the_ends_of_the_transfer():
    pages = np.arange(10, 20)
    second = SimpleNamespace(attn_cp_rank=1, attn_cp_size=2)
    found, where = filter_kv_indices_for_cp_rank(second, pages, slice(None))
    assert (found.tolist(), where) == ([15, 16, 17, 18, 19], slice(5, 10))
    found, where = filter_kv_indices_for_cp_rank(second, pages, slice(None), 8)
    assert (found.tolist(), where) == ([14, 15, 16, 17], slice(4, 8))
    found, where = filter_kv_indices_for_cp_rank(second, pages, slice(9, None), 8)
    assert (found.tolist(), where) == ([], slice(9, 9))


def test_a_group_of_one_sends_everything_as_it_is():
    alone = SimpleNamespace(attn_cp_rank=0, attn_cp_size=1)
    pages, chunk = [1, 2, 3], slice(4, None)
    found, where = filter_kv_indices_for_cp_rank(alone, pages, chunk, 2)
    assert found is pages
    assert where is chunk


@pytest.mark.parametrize(
    ("arguments", "error", "rule"),
    [
        (([1], slice(0, 2), 9), ValueError, r"kv_indices must be the 2 pages .*\[0, 2\), got 1"),
        (([1], slice(0, None), 9), ValueError, r"must be the 9 pages .*\[0, 9\), got 1"),
        (([], slice(3, 1), 9), ValueError, r"0 <= start <= stop, got \[3, 1\)"),
        (([], slice(-3, None), 9), ValueError, r"0 <= start <= stop, got \[-3, 9\)"),
        (([1], slice(0, 1, 3), 9), ValueError, "index_slice must have no step, got 3"),
        (([1], slice(0, 1), -1), ValueError, "total_pages must be >= 0, got -1"),
        (([1], 0), TypeError, "index_slice must be a slice, got int"),
        (([1], slice(0, 1), 1.5), TypeError, "total_pages must be an integer, got float"),
        ((["1"], slice(0, 1)), TypeError, "kv_indices"),
    ],
)
def test_shares_refused(arguments, error, rule):
    with pytest.raises(error, match=f"^{CP}: .*{rule}"):
        filter_kv_indices_for_cp_rank(KVSender(1, 2), *arguments)


@pytest.mark.parametrize(
    ("rank", "size", "error", "rule"),
    [
        (2, 2, ValueError, r"attn_cp_rank must be in \[0, 2\) of attn_cp_size, got 2"),
        (0, 0, ValueError, "attn_cp_size must be >= 1, got 0"),
        ("0", 2, TypeError, "attn_cp_rank must be an integer, got str"),
        (0, None, TypeError, "attn_cp_size must be an integer, got NoneType"),
    ],
)
def test_groups_refused(rank, size, error, rule):
    manager = SimpleNamespace(attn_cp_rank=rank, attn_cp_size=size)
    with pytest.raises(error, match=f"^{CP}: {rule}"):
        filter_kv_indices_for_cp_rank(manager, [1], slice(0, 1))
    with pytest.raises(TypeError, match=f"^{CP}: kv_mgr must have attn_cp_rank, attn_cp_size"):
        filter_kv_indices_for_cp_rank(None, [1], slice(0, 1))


@given(st.integers(0, 100), st.integers(1, 20))
def test_every_layer_has_one_owner(total, size):
    ranges = [range(*get_layer_shard_range(rank, size, total)) for rank in range(size)]
    assert [layer for layers in ranges for layer in layers] == list(range(total))
    assert [len(layers) for layers in ranges] == [len(range(r, total, size)) for r in range(size)]
    owners = [rank for rank, layers in enumerate(ranges) for _ in layers]
    assert [get_layer_owner(layer, size, total) for layer in range(total)] == owners


def test_layers_refused():
    for layer in (-1, 7, 2**40):
        with pytest.raises(
            ValueError, match=rf"^get_layer_owner: local_layer_idx .*\[0, 7\) .* got {layer}"
        ):
            get_layer_owner(layer, 3, 7)
    with pytest.raises(ValueError, match=r"^get_layer_shard_range: rank must be in \[0, 3\)"):
        get_layer_shard_range(3, 3, 7)
    with pytest.raises(ValueError, match=r"^get_layer_shard_range: shard_size must be >= 1, got 0"):
        get_layer_shard_range(0, 0, 7)
    with pytest.raises(ValueError, match=r"^get_layer_shard_range: total_layers must be >= 0"):
        get_layer_shard_range(0, 1, -7)
    with pytest.raises(TypeError, match=r"^get_layer_owner: shard_size must be an integer"):
        get_layer_owner(0, 1.0, 7)


@pytest.mark.parametrize("may_elide", [False, True])
def test_elided_entries(may_elide):
    def elided(src_len, dst_lens, dst_index):
        return is_elided_entry(src_len, dst_lens, dst_index, allow_dst_elision=may_elide)

    assert elided(0, None, 0)
    assert elided(0, [8], 0)
    assert not elided(8, None, 0)
    assert not elided(8, [8, 0], 0)
    assert elided(8, [8, 0], 1) is may_elide
    assert not elided(8, [8, 0], 2)
    assert elided(8, np.array([8, 0]), 1) is may_elide


def test_elided_entries_refused():
    with pytest.raises(ValueError, match=r"^is_elided_entry: src_len must be >= 0, got -1"):
        is_elided_entry(-1, [], 0)
    with pytest.raises(ValueError, match=r"^is_elided_entry: dst_index must be >= 0, got -1"):
        is_elided_entry(1, [0], -1)
    with pytest.raises(ValueError, match=r"^is_elided_entry: dst_lens must be >= 0, got -2 at ind"):
        is_elided_entry(1, [0, -2], 0)
    with pytest.raises(TypeError, match=r"^is_elided_entry: dst_lens"):
        is_elided_entry(1, ["0"], 0)
    with pytest.raises(TypeError, match=r"^is_elided_entry: allow_dst_elision must be a bool"):
        is_elided_entry(1, [0], 0, allow_dst_elision=1)
