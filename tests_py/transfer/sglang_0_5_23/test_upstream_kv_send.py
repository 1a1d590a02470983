# SPDX-License-Identifier: Apache-2.0
"""Sends agree with sglang, over thousands of random cases."""

from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer import sglang_0_5_23
from support.sglang.sglang_planning import kv_list, random_stage
from support.sglang.sglang_upstream import ImmediateExecutor, make_manager
from support.transfer.plan_blocks import blocks


def unique_pages(rng: np.random.Generator, num_pages: int, total: int) -> np.ndarray:
    """Draw different pages of a pool except page 0, half of the time in ascending order."""
    pages = 1 + rng.permutation(total - 1)[:num_pages]
    return (np.sort(pages) if rng.random() < 0.5 else pages).astype(np.int32)


def random_kv_args(rng: np.random.Generator, *, is_mla: bool) -> tuple[SimpleNamespace, list[int]]:
    """Return the KVArgs of a prefill stage, and the addresses of a decode server's buffers."""
    num_layers, stage = random_stage(rng)
    groups = str(rng.choice(["KV", "KVI"])) if is_mla else "KV"
    page_bytes = {"K": 512, "V": 512 if rng.random() < 0.5 else 96, "I": 64}
    with_draft = stage.stop == num_layers and rng.random() < 0.3
    draft = int(rng.integers(0, 3))
    held = kv_list(stage, groups, draft if with_draft else 0)
    addrs = 2**48 + 2**32 * (1 + rng.permutation(200).astype(np.int64))
    item_lens = [page_bytes[name.removeprefix("d")[0]] for name in held]
    kv_args = SimpleNamespace(
        engine_rank=0, page_size=8, prefill_start_layer=stage.start, prefill_end_layer=stage.stop,
        kv_data_ptrs=addrs[: len(held)].tolist(), kv_item_lens=item_lens, kv_layer_ids=None,
        kv_data_lens=[4096 * item_len for item_len in item_lens], kv_buf_groups=len(groups),
        total_kv_layers=num_layers, hidden_kv_layers=num_layers, draft_kv_layers=draft,
        mla_compression_ratios=None,
    )  # fmt: skip
    return kv_args, addrs[100 : 100 + len(kv_list(range(num_layers), groups, draft))].tolist()


@pytest.mark.parametrize("is_mla", [False, True])
def test_plan_send_kvcache(sglang, rng, is_mla):
    for _ in range(1000):
        kv_args, dst_ptrs = random_kv_args(rng, is_mla=is_mla)
        pp_size, is_last = int(rng.integers(1, 3)), bool(rng.integers(2))
        num_pages = int(rng.integers(0, 30))
        src, dst = unique_pages(rng, num_pages, 4096), unique_pages(rng, num_pages, 60)
        sglang.parallel.pp_group.is_last_rank = is_last
        manager = make_manager(sglang, kv_args=kv_args, pp_size=pp_size, is_mla_backend=is_mla)
        sent = manager.send_kvcache("s", src, dst_ptrs, dst, ImmediateExecutor())
        options = {"pp_size": pp_size, "is_mla": is_mla, "is_last_rank": is_last, "compat": True}
        planned = sglang_0_5_23.plan_send_kvcache(kv_args, dst_ptrs, src, dst, **options)
        assert sent == 0
        assert blocks(planned) == manager.engine.blocks


@pytest.mark.parametrize("kind", ["mooncake", "ascend"])
@pytest.mark.parametrize("is_mla", [False, True])
def test_plan_send_kvcache_by_layer(sglang, rng, kind, is_mla):
    for _ in range(500):
        kv_args, _ = random_kv_args(rng, is_mla=is_mla)
        n = len(kv_args.kv_data_ptrs)
        layers = rng.permutation(60)[: max(n, 1)]
        kv_args.kv_layer_ids = np.sort(layers[rng.integers(0, len(layers), n)]).tolist()
        beyond = layers[: int(rng.integers(0, 3))].tolist()
        dst_ids = rng.permutation(kv_args.kv_layer_ids + beyond).tolist()
        dst_ptrs = (2**50 + 2**32 * rng.permutation(len(dst_ids))).tolist()
        pp_size, num_pages = 2 if kind == "ascend" else rng.integers(1, 3), rng.integers(1, 30)
        src, dst = unique_pages(rng, num_pages, 4096), unique_pages(rng, num_pages, 60)
        manager = make_manager(
            sglang, kind, kv_args=kv_args, pp_size=pp_size, is_mla_backend=is_mla,
            is_hybrid_mla_backend=kind == "ascend",
        )  # fmt: skip
        sent = manager.send_kvcache("s", src, dst_ptrs, dst, ImmediateExecutor(), dst_ids)
        planned = sglang_0_5_23.plan_send_kvcache(
            kv_args, dst_ptrs, src, dst, pp_size=pp_size, is_mla=is_mla, dst_layer_ids=dst_ids,
            compat=True,
        )  # fmt: skip
        assert sent == 0
        assert blocks(planned) == manager.engine.blocks


def joined(blocks: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbours that continue each other on both sides."""
    result: list[tuple[int, int, int]] = []
    for src, dst, length in blocks:
        if result and result[-1][0] + result[-1][2] == src and result[-1][1] + result[-1][2] == dst:
            src, dst, length = result[-1][0], result[-1][1], result.pop()[2] + length
        result.append((src, dst, length))
    return result


def test_plan_send_kvcache_slice(sglang, rng):
    for _ in range(1000):
        prefill_tp, decode_tp, heads = (int(2 ** rng.integers(0, 5)) for _ in range(3))
        rank = int(rng.integers(prefill_tp))
        first = rank * decode_tp // prefill_tp
        dst_rank = int(rng.integers(first, first + max(decode_tp // prefill_tp, 1)))
        page_size, head_bytes = int(rng.choice([1, 4, 16])), 32
        src_len, dst_len = (
            page_size * head_bytes * max(heads // size, 1) for size in (prefill_tp, decode_tp)
        )
        kv_args, dst_ptrs = random_kv_args(rng, is_mla=False)
        num_entries = len(kv_args.kv_data_ptrs)
        kv_args.engine_rank = rank
        kv_args.page_size = page_size
        kv_args.kv_item_lens = [src_len] * num_entries
        kv_args.kv_data_lens = [src_len * 4096] * num_entries
        kv_args.kv_head_num, kv_args.total_kv_head_num = max(heads // prefill_tp, 1), heads
        num_pages = int(rng.integers(0, 10))
        src, dst = unique_pages(rng, num_pages, 4096), unique_pages(rng, num_pages, 60)
        manager = make_manager(sglang, kv_args=kv_args, attn_tp_size=prefill_tp, pp_size=2)
        sent = manager.send_kvcache_slice(
            "s", src, dst_ptrs, dst, dst_rank, decode_tp, dst_len, ImmediateExecutor()
        )
        planned = sglang_0_5_23.plan_send_kvcache_slice(
            kv_args, dst_ptrs, src, dst, pp_size=2,
            dst_tp_rank=dst_rank, dst_attn_tp_size=decode_tp, dst_kv_item_len=dst_len,
            attn_tp_size=prefill_tp, compat=True,
        )  # fmt: skip
        assert sent == 0
        assert joined(blocks(planned)) == joined(manager.engine.blocks)


def random_buffers(rng: np.random.Generator, num_buffers: int) -> tuple[list[int], list[int]]:
    """Return addresses of buffers, and the bytes of an item in each."""
    addrs = 2**48 + 2**24 * (1 + rng.permutation(1000)[:num_buffers].astype(np.int64))
    return addrs.tolist(), rng.choice([64, 512, 4096], num_buffers).tolist()


def test_plan_send_aux(sglang, rng):
    for _ in range(500):
        ptrs, item_lens = random_buffers(rng, int(rng.integers(1, 12)))
        dst_ptrs, _ = random_buffers(rng, int(rng.integers(1, 12)))
        src_index, dst_index = (int(i) for i in rng.integers(0, 500, 2))
        kv_args = SimpleNamespace(aux_data_ptrs=ptrs, aux_item_lens=item_lens)
        manager = make_manager(sglang, kv_args=kv_args)
        request = SimpleNamespace(mooncake_session_id="s", dst_aux_index=dst_index)
        manager.send_aux(request, src_index, dst_ptrs)
        planned = sglang_0_5_23.plan_send_aux(kv_args, dst_ptrs, src_index, dst_index, compat=True)
        assert blocks(planned) == manager.engine.blocks


def test_plan_send_state(sglang, rng):
    kinds = sglang.base.StateType
    for _ in range(500):
        order = rng.permutation(3)[: rng.integers(1, 4)]
        types = [(kinds.MAMBA, kinds.SWA, kinds.DSA)[i] for i in order]
        src_indices, dst_indices, ptrs, item_lens, dst_ptrs = [], [], [], [], []
        for kind in types:
            num_items = [1, 1] if kind == kinds.MAMBA else rng.integers(1, 9, 2)
            src_indices.append(unique_pages(rng, num_items[0], 100).tolist())
            dst_indices.append(unique_pages(rng, num_items[1], 100).tolist())
            num_buffers = 2 * int(rng.integers(1, 4))
            addrs, lens = random_buffers(rng, num_buffers)
            ptrs.append(addrs)
            item_lens.append(lens)
            dst_ptrs.append(random_buffers(rng, num_buffers)[0])
        no_ids = [[] for _ in types]
        kv_args = SimpleNamespace(
            prefill_start_layer=0, state_types=types, state_data_ptrs=ptrs,
            state_item_lens=item_lens, state_dim_per_tensor=no_ids, state_layer_ids=no_ids,
        )  # fmt: skip
        manager = make_manager(
            sglang, kv_args=kv_args, state_tp_size=1, state_strides_validated={"s"},
            request_status={7: sglang.base.KVPoll.Transferring},
        )  # fmt: skip
        request = SimpleNamespace(mooncake_session_id="s", room=7, dst_state_indices=dst_indices)
        registered = SimpleNamespace(
            dst_state_data_ptrs=dst_ptrs, dst_state_item_lens=item_lens, dst_attn_tp_size=1,
            dst_state_dim_per_tensor=no_ids, dst_state_layer_ids=no_ids, dst_tp_rank=0,
        )  # fmt: skip
        assert manager.maybe_send_extra(request, src_indices, ImmediateExecutor(), registered) == 0
        planned = sglang_0_5_23.plan_send_state(
            kv_args, dst_ptrs, src_indices, dst_indices, compat=True
        )
        assert blocks(planned) == manager.engine.blocks
