# SPDX-License-Identifier: Apache-2.0
"""Prefill ranks that a decode rank pulls from, and how many answers both sides wait for."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from cpattn.transfer.sglang_0_5_23 import decode_targets, pull_targets

POWERS = (1, 2, 4, 8)


def test_latents_striped_over_tensor_parallel_ranks():
    sizes = {"prefill_tp_size": 4, "decode_tp_size": 4, "enable_kv_cache_sharding": True}
    for rank in range(8):
        found = pull_targets(rank, **sizes, is_mla=True)
        assert found == (None, [0, 1, 2, 3], [0], [0], 4, 4)
    heads = pull_targets(6, **sizes, is_mla=False)
    assert heads == (2, [2], [0], [0], 1, 1), "heads are no latent"


@pytest.mark.parametrize("is_mla", [False, True])
def test_tensor_parallel_ranks_are_those_of_decode_targets(is_mla):
    for prefill, decode in product(POWERS, repeat=2):
        for rank in range(2 * decode):
            sizes = {"prefill_tp_size": prefill, "decode_tp_size": decode, "is_mla": is_mla}
            found, of = pull_targets(rank, **sizes), decode_targets(rank, **sizes)
            tp_ranks = [*of.ranks, *of.dummy_ranks]
            waits = max(1, decode // prefill), len(of.ranks)
            assert found == (tp_ranks[0], tp_ranks, [0], [0], *waits)


def senders(found, is_mla):
    """The ranks with data for this decode rank."""
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


def test_stages():
    sizes = {"prefill_tp_size": 1, "decode_tp_size": 1, "is_mla": True, "prefill_pp_size": 3}
    assert pull_targets(0, **sizes)[3:] == ([0, 1, 2], 1, 3)
    assert pull_targets(0, **sizes, decode_pp_size=3, pp_rank=2)[3:] == ([2], 1, 1)


STRIPED, DCP = {"enable_kv_cache_sharding": True}, {"decode_dcp_size": 2}
REFUSALS = [
    ({"engine_rank": -1}, "engine_rank must be >= 0, got -1"),
    ({"prefill_tp_size": 3}, "one of .* must divide the other, got 3 and 2"),
    ({"decode_tp_size": 0}, "decode_tp_size must be >= 1, got 0"),
    (STRIPED | {"prefill_tp_size": 4}, "decode_tp_size must be prefill_tp_size 4 where .*, got 2"),
    ({"decode_cp_size": 2}, "decode_cp_size must be 1, got 2"),
    ({"prefill_cp_size": 0}, "prefill_cp_size must be >= 1, got 0"),
    ({"prefill_pp_size": 3, "decode_pp_size": 2}, "decode_pp_size must be 1 or .* 3, got 2"),
    ({"pp_rank": 1}, r"pp_rank must be in \[0, 1\), got 1"),
    (DCP | {"prefill_cp_size": 2}, "prefill_cp_size must be 1 with decode_dcp_size 2, got 2"),
    (DCP | STRIPED, "enable_kv_cache_sharding must be False with decode_dcp_size 2, got True"),
]


@pytest.mark.parametrize(("changes", "rule"), REFUSALS)
def test_pull_targets_refuse(changes, rule):
    arguments = {"engine_rank": 0, "prefill_tp_size": 2, "decode_tp_size": 2, "is_mla": True}
    with pytest.raises(ValueError, match=f"^pull_targets: .*{rule}"):
        pull_targets(**arguments | changes)
