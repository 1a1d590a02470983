# SPDX-License-Identifier: Apache-2.0
"""Shards of pages and layers, their senders and receivers agree with sglang's own functions."""

from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer import sglang_0_5_23
from cpattn.transfer.sglang_0_5_23 import KVSender
from support.sglang.sglang_upstream import ImmediateExecutor, make_manager
from support.transfer.plan_blocks import blocks


@pytest.fixture(scope="module", autouse=True)
def shards(sglang):
    if not hasattr(sglang.disaggregation, "filter_kv_indices_for_shard_rank"):
        pytest.skip("this release of sglang shards no KV cache")


def listed(found):
    """Return pages and their places as plain values."""
    pages, where = found
    return [int(page) for page in pages], where if isinstance(where, slice) else [*map(int, where)]


def random_sender(rng):
    cp_size, shard_size = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    flags = [bool(flag) for flag in rng.integers(0, 2, 4)]
    return KVSender(
        int(rng.integers(cp_size)), cp_size, int(rng.integers(shard_size)), shard_size, *flags
    )


def test_plan_send_indices(sglang, rng, monkeypatch):
    parallel = SimpleNamespace()
    monkeypatch.setattr(sglang.conn, "get_parallel", lambda: parallel)
    for _ in range(2000):
        sender = random_sender(rng)
        parallel.enable_dsa_cache_layer_split = sender.enable_dsa_cache_layer_split
        finished = []
        manager = SimpleNamespace(
            **{
                name: getattr(sender, name)
                for name in ("attn_cp_rank", "attn_cp_size", "kv_shard_rank", "kv_shard_size",
                             "enable_all_cp_ranks_for_transfer", "is_dummy_cp_rank")
            },
            update_status=lambda room, status, to=finished: to.append(status),
        )  # fmt: skip
        theirs = object.__new__(sglang.conn.CommonKVSender)
        total = int(rng.integers(0, 20))
        vars(theirs).update(kv_mgr=manager, curr_idx=0, num_kv_indices=total, bootstrap_room=7)
        pages = rng.permutation(100)[:total].astype(np.int32)
        ends = sorted({*rng.integers(0, total + 1, 2).tolist(), total})
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            expected = theirs._prepare_send_indices(pages[start:end])
            got = sglang_0_5_23.plan_send_indices(
                sender, pages[start:end], curr_idx=start, num_kv_indices=total
            )
            assert listed(got[:2]) == listed(expected[:2])
            assert got[2:4] == expected[2:4]
            assert bool(finished) == (got.is_last_chunk and got.should_skip)


def test_sends_replicated_state(sglang, rng, monkeypatch):
    parallel = SimpleNamespace()
    monkeypatch.setattr(sglang.conn, "get_parallel", lambda: parallel)
    for _ in range(500):
        sender = random_sender(rng)
        parallel.enable_dsa_cache_layer_split = sender.enable_dsa_cache_layer_split
        parallel.enable_cp_tp_group_sharing = sender.enable_cp_tp_group_sharing
        skips = sglang.conn.CommonKVManager._should_skip_cp_replicated_state_transfer(sender)
        assert sender.sends_replicated_state == (not skips)


def test_pull_targets(sglang, rng):
    num_mapped = 0
    for _ in range(3000):
        tp_size, cp_size, stages = (
            int(rng.choice(n)) for n in ([1, 2, 4, 8], [1, 2, 3], [1, 2, 3])
        )
        flags = ("enable_kv_cache_sharding", "enable_dsa_cache_layer_split")
        flags = dict(zip(flags, rng.integers(0, 2, 2).astype(bool).tolist(), strict=True))
        prefill = SimpleNamespace(
            attn_tp_size=tp_size, attn_cp_size=cp_size, pp_size=stages, **flags
        )
        pp_size = int(rng.choice([1, 2]))
        decode = SimpleNamespace(
            is_mla_backend=bool(rng.integers(2)), attn_tp_size=int(rng.choice([1, 2, 4, 8])),
            is_hybrid_mla_backend=True,  # it only spares a warning
            attn_cp_size=int(rng.choice([1, 1, 1, 2])), attn_cp_rank=0, pp_size=pp_size,
            pp_rank=int(rng.integers(pp_size)),
            enable_all_cp_ranks_for_transfer=bool(rng.integers(2)),
            kv_args=SimpleNamespace(engine_rank=int(rng.integers(0, 16))),
        )  # fmt: skip
        arguments = flags | {
            "prefill_tp_size": tp_size, "decode_tp_size": decode.attn_tp_size,
            "is_mla": decode.is_mla_backend, "prefill_cp_size": cp_size, "prefill_pp_size": stages,
            "decode_cp_size": decode.attn_cp_size, "decode_pp_size": decode.pp_size,
            "pp_rank": decode.pp_rank,
            "enable_all_cp_ranks_for_transfer": decode.enable_all_cp_ranks_for_transfer,
        }  # fmt: skip
        try:
            sglang.conn.CommonKVManager._resolve_rank_mapping(decode, prefill)
        except AssertionError:
            with pytest.raises(ValueError, match=r"^pull_targets: decode_\w+_size must be"):
                sglang_0_5_23.pull_targets(decode.kv_args.engine_rank, **arguments)
            continue
        found = sglang_0_5_23.pull_targets(decode.kv_args.engine_rank, **arguments)
        assert found._asdict() == {name: getattr(prefill, name) for name in found._fields}
        num_mapped += 1
    assert num_mapped > 1000


def test_get_mla_kv_ptrs_with_pp_of_flat_lists_compat(sglang, rng):
    for _ in range(2000):
        src = list(range(rng.integers(1, 20)))
        dst = list(range(1000, 1000 + rng.integers(0, 40)))
        start, drafts = int(rng.integers(0, 12)), int(rng.integers(0, 4))
        kv_args = SimpleNamespace(
            prefill_start_layer=start, num_draft_entries=drafts, mla_compression_ratios=None
        )
        manager = make_manager(sglang, "mooncake", kv_args=kv_args, is_mla_backend=True)
        found = sglang_0_5_23.get_mla_kv_ptrs_with_pp(
            src, dst, prefill_start_layer=start, num_draft_entries=drafts, compat=True
        )
        assert found == manager.get_mla_kv_ptrs_with_pp(src, dst), (len(src), len(dst), start)


def random_state(rng):
    """Draw item lengths and layer ids of a DSA component on both sides, and its first layer."""
    num_layers = int(rng.integers(1, 9))
    start = int(rng.integers(0, num_layers))
    src = rng.choice([0, 64, 64, 512], rng.integers(1, num_layers - start + 1)).tolist()
    dst = rng.choice([0, 64], num_layers).tolist()
    if rng.random() < 0.8:  # most cases fit
        for i, item_len in enumerate(src):
            dst[start + i] = item_len if rng.random() < 0.9 else 0
    if rng.random() < 0.3:
        dst = dst[start : start + len(src)]
    ids = [], []
    if rng.random() < 0.4 and len(dst) == num_layers:
        ids = list(range(start, start + len(src))), list(range(num_layers))
    if rng.random() < 0.1:
        ids = ids[0], []
    return src, dst, ids, start


def test_plan_send_state_of_elided_and_striped_entries(sglang, rng, monkeypatch):
    sharding = SimpleNamespace()
    monkeypatch.setattr(sglang.mooncake, "get_parallel", lambda: sharding)
    outcomes = {"sent": 0, "refused": 0}
    for _ in range(2000):
        src_lens, dst_lens, (src_ids, dst_ids), start = random_state(rng)
        src_ptrs, dst_ptrs = (
            (2**40 * side + 2**20 * np.arange(len(lens), dtype=np.int64)).tolist()
            for side, lens in ((1, src_lens), (2, dst_lens))
        )
        published = dst_lens[: -1 if rng.random() < 0.1 else None]
        size = int(rng.choice([1, 1, 2, 3]))
        rank, pp_size = int(rng.integers(size)), int(rng.integers(1, 3))
        sharding.enable_kv_cache_sharding = size > 1
        num_pages = int(rng.integers(1, 9))
        src = rng.permutation(60)[:num_pages].tolist()
        dst = rng.permutation(60)[: num_pages - (rng.random() < 0.1)].tolist()
        kv_args = SimpleNamespace(
            prefill_start_layer=start, mla_compression_ratios=None, state_item_lens=[src_lens],
            state_types=[sglang.base.StateType.DSA], state_data_ptrs=[src_ptrs],
            state_layer_ids=[src_ids], state_dim_per_tensor=[[]],
        )  # fmt: skip
        manager = make_manager(
            sglang, "mooncake", kv_args=kv_args, pp_size=pp_size, is_mla_backend=True,
            state_tp_size=1, kv_shard_rank=rank, kv_shard_size=size,
            request_status={7: sglang.base.KVPoll.Transferring},
            conclude_failure=lambda **reason: None,
        )  # fmt: skip
        request = SimpleNamespace(mooncake_session_id="s", room=7, dst_state_indices=[dst])
        registered = SimpleNamespace(
            dst_state_data_ptrs=[dst_ptrs], dst_state_item_lens=[published], dst_attn_tp_size=1,
            dst_state_dim_per_tensor=[[]], dst_state_layer_ids=[dst_ids], dst_tp_rank=0,
        )  # fmt: skip
        arguments = kv_args, [dst_ptrs], [src], [dst]
        options = {
            "is_mla": True, "dst_state_item_lens": [published], "dst_state_layer_ids": [dst_ids],
            "pp_size": pp_size, "kv_shard_rank": rank, "kv_shard_size": size,
        }  # fmt: skip
        try:
            code = manager.maybe_send_extra(request, [src], ImmediateExecutor(), registered)
        except RuntimeError:
            code = -1
        if code == 0:
            plan = sglang_0_5_23.plan_send_state(*arguments, **options, compat=True)
            assert blocks(plan) == manager.engine.blocks
            outcomes["sent"] += 1
            continue
        for compat in (False, True):
            with pytest.raises((ValueError, RuntimeError)):
                sglang_0_5_23.plan_send_state(*arguments, **options, compat=compat)
        outcomes["refused"] += 1
    assert min(outcomes.values()) > 100, outcomes
