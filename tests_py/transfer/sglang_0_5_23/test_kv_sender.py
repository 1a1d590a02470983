# SPDX-License-Identifier: Apache-2.0
"""Filters that apply to a rank, places of its pages, and peers of a decode rank are right."""

from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer.sglang_0_5_23 import (
    KVSender,
    KVSendIndices,
    filter_kv_indices_for_cp_rank,
    filter_kv_indices_for_shard_rank,
    get_layer_shard_range,
    is_elided_entry,
    plan_send_indices,
    pull_targets,
)

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


STRIPED = KVSender(kv_shard_rank=1, kv_shard_size=2)
WHOLE = KVSender()


def test_too_few_pages_of_the_destination():
    for sender, rule in ((STRIPED, "position 2"), (WHOLE, r"pages \[0, 3\)")):
        planned = plan_send_indices(sender, [5, 6, 7], curr_idx=0, num_kv_indices=3)
        message = f"^KVSendIndices.select: dst_kv_indices must have {rule}, got 2 pages"
        with pytest.raises(ValueError, match=message):
            planned.select([1, 2])
        # Engines fail in two ways: one ends their thread, the other leaves pages unsent.
        planned = plan_send_indices(sender, [5, 6, 7], curr_idx=0, num_kv_indices=3, compat=True)
        if sender is WHOLE:
            assert planned.select([1, 2]) == ([5, 6], [1, 2])
            continue
        with pytest.raises(IndexError, match=r"index 2 is out of bounds of 2 pages"):
            planned.select([1, 2])
    assert KVSendIndices([5], slice(0, 1), True, True).select([]) == ([], [])


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


def senders(found, is_mla):
    """Return the ranks that have data for this decode rank."""
    tp_ranks = found.target_tp_ranks
    if is_mla and found.target_tp_rank is not None:
        tp_ranks = [found.target_tp_rank]
    return list(product(tp_ranks, found.target_cp_ranks, found.target_pp_ranks))


def test_every_sender_answers_once_and_waits_for_all():
    for prefill_tp, decode_tp, cp, pp, is_mla, sharded, split, all_ranks in product(
        (1, 2, 4), (1, 2, 4), (1, 3), (1, 2), *([(False, True)] * 4)
    ):
        if is_mla and sharded and cp == 1 and prefill_tp != decode_tp:
            continue
        registered = Counter()
        for rank in range(decode_tp):
            found = pull_targets(
                rank, prefill_tp_size=prefill_tp, decode_tp_size=decode_tp, is_mla=is_mla,
                prefill_cp_size=cp, prefill_pp_size=pp, enable_kv_cache_sharding=sharded,
                enable_dsa_cache_layer_split=split, enable_all_cp_ranks_for_transfer=all_ranks,
            )  # fmt: skip
            pulls = cp > 1 and (sharded or split or all_ranks)
            assert found.target_cp_ranks == list(range(cp if pulls else 1))
            assert found.target_pp_ranks == list(range(pp))
            assert found.required_prefill_response_num == len(senders(found, is_mla))
            registered.update(
                product(found.target_tp_ranks, found.target_cp_ranks, found.target_pp_ranks)
            )
            waiting = found.required_dst_info_num
        assert set(registered.values()) == {waiting}
        assert {tp for tp, _, _ in registered} == set(range(prefill_tp))


PAGES = {"kv_indices": [1], "index_slice": slice(0, 1)}
# Arguments that are taken, by function.
TAKEN = {
    KVSender: {},
    plan_send_indices: {"sender": WHOLE, "kv_indices": [1, 2], "curr_idx": 1, "num_kv_indices": 3},
    filter_kv_indices_for_shard_rank: PAGES | {"shard_rank": 1, "shard_size": 2},
    filter_kv_indices_for_cp_rank: PAGES | {"kv_mgr": KVSender(1, 2)},
    get_layer_shard_range: {"rank": 0, "shard_size": 3, "total_layers": 7},
    is_elided_entry: {"src_len": 1, "dst_lens": [0], "dst_index": 0},
    pull_targets: {"engine_rank": 0, "prefill_tp_size": 2, "decode_tp_size": 2, "is_mla": True},
}
BY_PAGES, DCP = {"enable_kv_cache_sharding": True}, {"decode_dcp_size": 2}


def group(rank, size):
    return {"kv_mgr": SimpleNamespace(attn_cp_rank=rank, attn_cp_size=size)}


REFUSED = {
    KVSender: [
        ({"attn_cp_rank": 2, "attn_cp_size": 2}, r"attn_cp_rank must be in \[0, 2\) ."),
        ({"kv_shard_rank": 1}, r"kv_shard_rank must be in \[0, 1\) .* got 1"),
        ({"attn_cp_size": 0}, "attn_cp_size must be >= 1, got 0"),
        ({"kv_shard_rank": -1}, "kv_shard_rank must be >= 0, got -1"),
    ],
    plan_send_indices: [
        ({"num_kv_indices": 2}, ".* must end within the 2 pages .* got 2 from page 1 on"),
        ({"curr_idx": -1}, "curr_idx must be >= 0, got -1"),
        ({"num_kv_indices": -1}, "num_kv_indices must be >= 0, got -1"),
    ],
    filter_kv_indices_for_shard_rank: [
        ({"index_slice": slice(0, 1, 2)}, "index_slice must have no step, got 2"),
        ({"index_slice": slice(None, 1)}, "index_slice.start must be an integer, got NoneType"),
        ({"index_slice": slice(0, None)}, "index_slice.stop must be an integer, got NoneType"),
        ({"index_slice": slice(0, 1, "1")}, "index_slice.step must be an integer, got str"),
    ],
    filter_kv_indices_for_cp_rank: [
        ({"index_slice": slice(0, 1, 3), "total_pages": 9}, "index_slice must have no step, got 3"),
        (group(0, 0), "attn_cp_size must be >= 1, got 0"),
        (group("0", 2), "attn_cp_rank must be an integer, got str"),
        (group(0, None), "attn_cp_size must be an integer, got NoneType"),
    ],
    get_layer_shard_range: [
        ({"rank": 3}, r"rank must be in \[0, 3\)"),
        ({"total_layers": -1}, "total_layers must be >= 0, got -1"),
    ],
    is_elided_entry: [
        ({"src_len": -1}, "src_len must be >= 0, got -1"),
        ({"dst_index": -1}, "dst_index must be >= 0, got -1"),
        ({"dst_lens": [0, -2]}, "dst_lens must be >= 0, got -2 at index 1"),
    ],
    pull_targets: [
        ({"engine_rank": -1}, "engine_rank must be >= 0, got -1"),
        ({"prefill_tp_size": 3}, "one of .* must divide the other, got 3 and 2"),
        ({"prefill_tp_size": 0}, "prefill_tp_size must be >= 1, got 0"),
        ({"decode_tp_size": 0}, "decode_tp_size must be >= 1, got 0"),
        (
            BY_PAGES | {"prefill_tp_size": 4},
            "decode_tp_size must be prefill_tp_size 4 where .*, got 2",
        ),
        ({"decode_cp_size": 2}, "decode_cp_size must be 1, got 2"),
        ({"prefill_cp_size": 0}, "prefill_cp_size must be >= 1, got 0"),
        ({"prefill_pp_size": 3, "decode_pp_size": 2}, "decode_pp_size must be 1 or .* 3, got 2"),
        ({"pp_rank": 1}, r"pp_rank must be in \[0, 1\), got 1"),
        (DCP | {"prefill_cp_size": 2}, "prefill_cp_size must be 1 with decode_dcp_size 2, got 2"),
        (DCP | BY_PAGES, "enable_kv_cache_sharding must be False with decode_dcp_size 2, got True"),
    ],
}


@pytest.mark.parametrize(
    ("function", "changes", "rule"),
    [(function, *row) for function, rows in REFUSED.items() for row in rows],
)
def test_refused(function, changes, rule):
    error = TypeError if "must be an integer" in rule else ValueError
    with pytest.raises(error, match=f"^{function.__name__}: {rule}"):
        function(**TAKEN[function] | changes)
