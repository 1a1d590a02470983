# SPDX-License-Identifier: Apache-2.0
"""Filters that apply to a rank, and where its pages go."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import KVSender, KVSendIndices, plan_send_indices

FLAGS = (
    "enable_dsa_cache_layer_split",
    "all_cp_ranks_transfer",
    "is_hybrid_mla_backend",
    "enable_cp_tp_group_sharing",
)


def all_senders():
    for cp_size, shard_size in product((1, 2, 3), (1, 3)):
        for cp_rank, shard_rank, *flags in product(
            range(cp_size), range(shard_size), *[(False, True)] * len(FLAGS)
        ):
            chosen = dict(zip(FLAGS, flags, strict=True))
            yield KVSender(cp_rank, cp_size, shard_rank, shard_size, **chosen)


def test_flags_of_a_rank():
    for sender in all_senders():
        divided = sender.is_hybrid_mla_backend or sender.enable_dsa_cache_layer_split
        sharded, sharing = sender.kv_shard_size > 1, sender.enable_cp_tp_group_sharing
        reasons = sender.all_cp_ranks_transfer or sharded or (sender.attn_cp_size > 1 and divided)
        assert sender.enable_all_cp_ranks_for_transfer == (reasons and not sharing)
        alone = sender.attn_cp_rank != 0 and not sharing
        assert sender.is_dummy_cp_rank == (alone and not reasons)
        exempt = sender.enable_dsa_cache_layer_split or sharded
        assert sender.sends_replicated_state == (not alone or exempt)


def expected(sender, pages, start, total):
    """(page of the rank, position) of all that is sent, and whether the chunk is skipped."""
    chunk = list(enumerate(pages, start))
    is_last = start + len(pages) == total
    if sender.kv_shard_size > 1:
        size, rank = sender.kv_shard_size, sender.kv_shard_rank
        sent = [(page // size, i) for i, page in chunk if page % size == rank]
        return sent, not sent and not is_last
    if sender.enable_all_cp_ranks_for_transfer and not sender.enable_dsa_cache_layer_split:
        size, rank = sender.attn_cp_size, sender.attn_cp_rank
        sizes = [len(range(r, total, size)) for r in range(size)]
        mine = range(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        return [(page, i) for i, page in chunk if i in mine], False
    if sender.is_dummy_cp_rank:
        return [], True
    return [(page, i) for i, page in chunk], False


@given(st.data())
def test_chunks_of_every_kind_of_rank(data):
    sender = data.draw(st.sampled_from(list(all_senders())))
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    total = sum(sizes)
    logical = data.draw(st.lists(st.integers(0, 99), min_size=total, max_size=total))
    dst_pages = np.arange(500, 500 + total)
    start = 0
    for size in sizes:
        pages = logical[start : start + size]
        found = plan_send_indices(sender, pages, curr_idx=start, num_kv_indices=total)
        sent, should_skip = expected(sender, pages, start, total)
        assert found.is_last_chunk == (start + size == total)
        assert found.should_skip == should_skip
        src, dst = found.select(dst_pages)
        assert [*src] == [page for page, _ in sent]
        assert [*dst] == [500 + position for _, position in sent]
        assert found.select(dst_pages.tolist())[1] == [500 + position for _, position in sent]
        start += size


STRIPED = KVSender(kv_shard_rank=1, kv_shard_size=2)
WHOLE = KVSender()


def test_too_few_pages_of_the_destination():
    for sender, rule in ((STRIPED, "position 2"), (WHOLE, r"pages \[0, 3\)")):
        planned = plan_send_indices(sender, [5, 6, 7], curr_idx=0, num_kv_indices=3)
        message = f"^KVSendIndices.select: dst_kv_indices must have {rule}, got 2 pages"
        with pytest.raises(ValueError, match=message):
            planned.select([1, 2])
        # As engines do: one ends their thread, the other leaves pages unsent.
        planned = plan_send_indices(sender, [5, 6, 7], curr_idx=0, num_kv_indices=3, compat=True)
        if sender is WHOLE:
            assert planned.select([1, 2]) == ([5, 6], [1, 2])
            continue
        with pytest.raises(IndexError, match=r"index 2 is out of bounds of 2 pages"):
            planned.select([1, 2])
    assert KVSendIndices([5], slice(0, 1), True, True).select([]) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"attn_cp_rank": 2, "attn_cp_size": 2}, r"attn_cp_rank must be in \[0, 2\) ."),
        ({"kv_shard_rank": 1}, r"kv_shard_rank must be in \[0, 1\) .* got 1"),
        ({"attn_cp_size": 0}, "attn_cp_size must be >= 1, got 0"),
        ({"kv_shard_rank": -1}, "kv_shard_rank must be >= 0, got -1"),
    ],
)
def test_senders_refused(arguments, rule):
    with pytest.raises(ValueError, match=f"^KVSender: {rule}"):
        KVSender(**arguments)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_kv_indices": 2}, "must end within the 2 pages .* got 2 from page 1 on"),
        ({"curr_idx": -1}, "curr_idx must be >= 0, got -1"),
        ({"num_kv_indices": -1}, "num_kv_indices must be >= 0, got -1"),
    ],
)
def test_chunks_refused(changes, rule):
    arguments = {"sender": WHOLE, "kv_indices": [1, 2], "curr_idx": 1, "num_kv_indices": 3}
    with pytest.raises(ValueError, match=f"^plan_send_indices: .*{rule}"):
        plan_send_indices(**arguments | changes)


def test_a_manager_of_an_engine_will_do():
    manager = SimpleNamespace(
        kv_shard_size=1, is_dummy_cp_rank=True, enable_all_cp_ranks_for_transfer=False,
        enable_dsa_cache_layer_split=False,
    )  # fmt: skip
    one_page = {"kv_indices": [1], "curr_idx": 0, "num_kv_indices": 1}
    found = plan_send_indices(manager, **one_page)
    assert (found.is_last_chunk, found.should_skip) == (True, True)
    manager.kv_shard_size = 2
    with pytest.raises(TypeError, match=r"^plan_send_indices: sender must have kv_shard_rank"):
        plan_send_indices(manager, **one_page)
    del manager.enable_dsa_cache_layer_split
    with pytest.raises(TypeError, match=r"sender must have enable_all_cp_ranks_for_transfer, enab"):
        plan_send_indices(manager, **one_page)
