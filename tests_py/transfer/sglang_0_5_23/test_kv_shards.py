# SPDX-License-Identifier: Apache-2.0
"""Sends of a rank that holds every N-th page, or divides pages or layers with others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer.sglang_0_5_23 import (
    KVSender,
    filter_kv_indices_for_cp_rank,
    filter_kv_indices_for_shard_rank,
    get_layer_owner,
    get_layer_shard_range,
    is_elided_entry,
)


def shard(pages, chunk, rank=1, size=2):
    return filter_kv_indices_for_shard_rank(
        kv_indices=pages, index_slice=chunk, shard_rank=rank, shard_size=size
    )


def test_pages_of_a_rank_that_stripes_them():
    pages, chunk = [6, 3, 5, 9], slice(7, 11)
    strided = np.repeat(np.array(pages, np.int32), 2)[::2]
    for given_pages, given_chunk in (
        (pages, chunk),
        (strided, slice(np.int64(7), np.int64(11), 1)),
    ):
        local, positions = shard(given_pages, given_chunk)
        assert (local.dtype, positions.dtype) == (np.int32, np.int64)
        assert (local.tolist(), positions.tolist()) == ([1, 2, 4], [8, 9, 10])


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


def test_layers_of_a_split():
    assert [get_layer_shard_range(rank, 3, 8) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]
    assert [get_layer_owner(layer, 3, 8) for layer in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


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


SECOND = KVSender(1, 2)


def share(*arguments, kv_mgr=SECOND):
    return filter_kv_indices_for_cp_rank(kv_mgr, *arguments)


def share_of_group(rank, size):
    return share([1], slice(0, 1), kv_mgr=SimpleNamespace(attn_cp_rank=rank, attn_cp_size=size))


BOUNDS = "0 <= start <= stop, got "
REFUSALS = [
    (shard, ([1], slice(0, 1, 2)), "index_slice must have no step, got 2"),
    (share, ([1], slice(0, 1, 3), 9), "index_slice must have no step, got 3"),
    (share_of_group, (0, 0), "attn_cp_size must be >= 1, got 0"),
    (get_layer_shard_range, (3, 3, 7), r"rank must be in \[0, 3\)"),
    (is_elided_entry, (-1, [], 0), "src_len must be >= 0, got -1"),
    (is_elided_entry, (1, [0], -1), "dst_index must be >= 0, got -1"),
    (is_elided_entry, (1, [0, -2], 0), "dst_lens must be >= 0, got -2 at index 1"),
]
TYPES = [
    (shard, ([1], slice(None, 1)), "index_slice.start must be an integer, got NoneType"),
    (shard, ([1], slice(0, None)), "index_slice.stop must be an integer, got NoneType"),
    (shard, ([1], slice(0, 1, "1")), "index_slice.step must be an integer, got str"),
    (share_of_group, ("0", 2), "attn_cp_rank must be an integer, got str"),
    (share_of_group, (0, None), "attn_cp_size must be an integer, got NoneType"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "rule", "error"),
    [(*row, error) for rows, error in ((REFUSALS, ValueError), (TYPES, TypeError)) for row in rows],
)
def test_refused(call, arguments, rule, error):
    with pytest.raises(error, match=rf"^(filter_kv_indices_for|get_layer|is_elided)_\w+: .*{rule}"):
        call(*arguments)
