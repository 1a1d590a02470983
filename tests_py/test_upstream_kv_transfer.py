# SPDX-License-Identifier: Apache-2.0
"""The functions that have a twin in sglang against that twin, over thousands of random cases.

Runs where a wheel of sglang is at hand (see `sglang_upstream`): 0.5.23, or 0.5.18 for the rule by
which stages with several groups of buffers found theirs up to 0.5.19.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cpattn
import sglang_upstream
from plan_blocks import blocks
from sglang_upstream import ImmediateExecutor, make_manager


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    modules = sglang_upstream.load()
    if modules is None:
        pytest.skip("sglang is not installed and CPATTN_SGLANG names no wheel of it")
    return modules


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23893)


#: What has no result, and the exceptions that say so: upstream's, some by accident, and ours.
REFUSALS = {
    "refused: no source entries": {
        ZeroDivisionError: "modulo by zero",
        ValueError: "^get_mha_kv_ptrs_with_pp: source must have an entry of K and one of V",
    },
    "refused: unequal lengths": {
        ValueError: "^group_concurrent_contiguous requires equal-length src/dst index arrays",
    },
    "refused: short destination": {  # by releases that went on for as long as it is
        IndexError: "list index out of range",
    },
}


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or why there is none. An exception of any other kind or wording is a failure."""
    try:
        return function(*args, **kwargs)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        for reason, exceptions in REFUSALS.items():
            if re.search(exceptions.get(type(error), "$^"), str(error)):
                return reason
        raise


def is_refusal(outcome: Any) -> bool:
    return isinstance(outcome, str)


def knows_drafts(sglang: SimpleNamespace) -> bool:
    """Whether stages with several groups of buffers are told their draft layers."""
    rule = sglang.ascend.AscendKVManager.get_mla_kv_ptrs_with_pp
    return "draft_kv_layers" in rule.__code__.co_consts


def random_pages(rng: np.random.Generator, num_pages: int) -> np.ndarray:
    """Runs of consecutive pages, broken at random, some backwards, some repeated."""
    steps = rng.choice([1, 1, 1, 1, 2, 7, 0, -1, -5], num_pages)
    return (100 + np.cumsum(steps)).astype(np.int32)


def unique_pages(rng: np.random.Generator, num_pages: int, total: int) -> np.ndarray:
    """Different pages of a pool, page 0 left out, half of the time in ascending order."""
    pages = 1 + rng.permutation(total - 1)[:num_pages]
    return (np.sort(pages) if rng.random() < 0.5 else pages).astype(np.int32)


def test_kv_to_page_indices(sglang, rng):
    for _ in range(1000):
        page_size, num_tokens = rng.integers(1, 65), rng.integers(0, 300)
        first = rng.integers(0, 1000) * page_size
        slots = torch.arange(first, first + num_tokens)
        expected = sglang.pages.kv_to_page_indices(slots, page_size)
        np.testing.assert_array_equal(
            cpattn.transfer.kv_to_page_indices(slots.numpy(), int(page_size)), expected
        )


def test_group_concurrent_contiguous(sglang, rng):
    for _ in range(3000):
        src = random_pages(rng, rng.integers(0, 12))
        same = rng.random() < 0.9
        dst = random_pages(rng, len(src) if same else rng.integers(0, 12))
        expected = outcome(sglang.utils.group_concurrent_contiguous, src, dst)
        got = outcome(cpattn.transfer.group_concurrent_contiguous, src, dst)
        if not is_refusal(got):
            got = tuple([[int(i) for i in group] for group in side] for side in got)
        assert got == expected, (src, dst)


def kv_list(layers: range, groups: str, draft_layers: int = 0) -> list[str]:
    """What the buffers of a pool hold, in the order in which servers list them."""
    target = [f"{group}{layer}" for group in groups for layer in layers]
    return target + [f"draft {group}{layer}" for group in groups for layer in range(draft_layers)]


def random_stage(rng: np.random.Generator) -> tuple[int, range]:
    """A model's number of layers, and those that one pipeline stage has."""
    num_layers = int(rng.integers(1, 24))
    start = int(rng.integers(0, num_layers))
    return num_layers, range(start, int(rng.integers(start, num_layers)) + 1)


def test_get_mha_kv_ptrs_with_pp_compat(sglang, rng):
    for _ in range(3000):
        src = list(range(rng.integers(1, 20)))
        dst = list(range(1000, 1000 + rng.integers(0, 60)))
        start = int(rng.integers(0, 12))
        manager = make_manager(sglang, kv_args=SimpleNamespace(prefill_start_layer=start))
        expected = outcome(manager.get_mha_kv_ptrs_with_pp, src, dst)
        got = outcome(
            cpattn.transfer.get_mha_kv_ptrs_with_pp,
            src,
            dst,
            prefill_start_layer=start,
            compat=True,
        )
        assert got == expected, (src, dst, start)


def test_get_mha_kv_ptrs_with_pp_is_right_where_upstream_is_not(sglang, rng):
    num_wrong = 0
    for _ in range(3000):
        num_layers, stage = random_stage(rng)
        src = kv_list(stage, "KV")
        dst = kv_list(range(num_layers), "KV", draft_layers=int(rng.integers(0, 4)))
        manager = make_manager(sglang, kv_args=SimpleNamespace(prefill_start_layer=stage.start))
        _, _, upstream_k, upstream_v, _ = manager.get_mha_kv_ptrs_with_pp(src, dst)
        num_wrong += src != (upstream_k + upstream_v)[: len(src)]

        _, _, dst_k, dst_v, _ = cpattn.transfer.get_mha_kv_ptrs_with_pp(
            list(range(len(src))),
            list(range(len(dst))),
            prefill_start_layer=stage.start,
            total_kv_layers=num_layers,
        )
        assert [dst[i] for i in [*dst_k, *dst_v]][: len(src)] == src
    assert num_wrong > 300


def mla_manager(sglang: SimpleNamespace, start: int, groups: int, hidden: int, draft: int) -> Any:
    kv_args = SimpleNamespace(
        prefill_start_layer=start,
        kv_buf_groups=groups,
        total_kv_layers=hidden,
        hidden_kv_layers=hidden,
        draft_kv_layers=draft,
        mla_compression_ratios=None,
    )
    return make_manager(sglang, kv_args=kv_args, pp_size=2, is_mla_backend=True)


def test_get_mla_kv_ptrs_with_pp_compat(sglang, rng):
    for _ in range(3000):
        src = list(range(rng.integers(1, 20)))
        dst = list(range(1000, 1000 + rng.integers(0, 60)))
        start, groups = int(rng.integers(0, 8)), int(rng.integers(1, 4))
        hidden, draft = int(rng.integers(0, 20)), int(rng.integers(0, 3))
        known = (
            {"hidden_kv_layers": hidden} if knows_drafts(sglang) else {"total_kv_layers": hidden}
        )
        sglang.parallel.pp_group.is_last_rank = bool(rng.integers(2))
        manager = mla_manager(sglang, start, groups, hidden, draft)
        expected = outcome(manager.get_mla_kv_ptrs_with_pp, src, dst)
        got = outcome(
            cpattn.transfer.get_mla_kv_ptrs_with_pp,
            src,
            dst,
            prefill_start_layer=start,
            kv_buf_groups=groups,
            draft_kv_layers=draft,
            is_last_rank=sglang.parallel.pp_group.is_last_rank,
            compat=True,
            **known,
        )
        assert got == expected, (src, dst, start, groups, hidden, draft)


def test_get_mla_kv_ptrs_with_pp_strict_agrees_where_upstream_is_right(sglang, rng):
    num_agreed = 0
    for _ in range(2000):
        num_layers, stage = random_stage(rng)
        groups = str(rng.choice(["KV", "KVI"]))
        is_last = stage.stop == num_layers
        draft = int(rng.integers(0, 3))
        src = kv_list(stage, groups, draft if is_last else 0)
        dst = kv_list(range(num_layers), groups, draft)
        sglang.parallel.pp_group.is_last_rank = is_last
        manager = mla_manager(sglang, stage.start, len(groups), num_layers, draft)
        _, upstream, _ = manager.get_mla_kv_ptrs_with_pp(src, dst)
        strict = outcome(
            cpattn.transfer.get_mla_kv_ptrs_with_pp,
            list(range(len(src))),
            list(range(len(dst))),
            prefill_start_layer=stage.start,
            kv_buf_groups=len(groups),
            hidden_kv_layers=num_layers,
            draft_kv_layers=draft,
            is_last_rank=is_last,
        )
        if not is_refusal(strict):
            assert [dst[i] for i in strict[1]][: len(src)] == src
        if upstream[: len(src)] == src:
            assert not is_refusal(strict), (src, dst)
            num_agreed += 1
    assert num_agreed > 500


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn"]


def make_pools(
    sglang: SimpleNamespace, rng: np.random.Generator, *, use_fia: bool
) -> tuple[Any, Any, str]:
    """The same random pool twice: sglang's and ours."""
    common = {
        "size": int(rng.integers(1, 200)),
        "page_size": int(rng.choice([1, 8, 16, 128])),
        "start_layer": int(rng.integers(0, 9)),
    }
    num_layers, dtype = int(rng.integers(1, 5)), str(rng.choice(DTYPES))
    shared = {"layer_num": num_layers, "device": "cpu", "enable_memory_saver": False}
    theirs = common | shared | {"dtype": getattr(torch, dtype)}
    ours = common | {"num_layers": num_layers, "dtype": dtype, "use_fia": use_fia}
    if rng.random() < 0.5:
        heads, dims = int(rng.integers(1, 5)), int(rng.choice([8, 16]))
        v_dim = [None, 8, 24][rng.integers(3)]
        upstream = sglang.npu_pools.NPUMHATokenToKVPool(
            head_num=heads, head_dim=dims, v_head_dim=v_dim, **theirs
        )
        return (
            upstream,
            cpattn.kv.MHATokenToKVPool(num_kv_heads=heads, head_dim=dims, v_head_dim=v_dim, **ours),
            "mha",
        )
    widths = {
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "index_head_dim": [None, 8][rng.integers(2)],
    }
    upstream = sglang.npu_pools.NPUMLATokenToKVPool(**widths, **theirs)
    return upstream, cpattn.kv.MLATokenToKVPool(**widths, **ours), "mla"


@pytest.fixture(params=["0", "1"])
def use_fia(request, monkeypatch) -> bool:
    monkeypatch.setenv("ASCEND_USE_FIA", request.param)
    return request.param == "1"


def layer_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_pool_buffers(sglang, rng, use_fia):
    for _ in range(60):
        upstream, pool, _ = make_pools(sglang, rng, use_fia=use_fia)
        ptrs, lens, item_lens = upstream.get_contiguous_buf_infos()
        our_ptrs, our_lens, our_item_lens = pool.get_contiguous_buf_infos()
        assert (our_lens, our_item_lens) == (lens, item_lens)
        for layer in range(pool.start_layer, pool.start_layer + pool.num_layers):
            for name in ("get_key_buffer", "get_value_buffer"):
                theirs, ours = getattr(upstream, name)(layer), getattr(pool, name)(layer)
                assert tuple(ours.shape) == tuple(theirs.shape)
                assert ours.dtype == theirs.dtype
        for i in range(0, len(ptrs), pool.num_layers):  # one allocation for the layers of a kind
            kind, our_kind = ptrs[i : i + pool.num_layers], our_ptrs[i : i + pool.num_layers]
            assert [p - our_kind[0] for p in our_kind] == [p - kind[0] for p in kind]


def test_pool_writes(sglang, rng, use_fia):
    for _ in range(60):
        upstream, pool, kind = make_pools(sglang, rng, use_fia=use_fia)
        layer = pool.start_layer + int(rng.integers(pool.num_layers))
        num_slots = pool.num_pages * pool.page_size
        loc = torch.from_numpy(rng.permutation(num_slots)[: rng.integers(0, num_slots)])
        like_k, like_v = upstream.get_key_buffer(layer), upstream.get_value_buffer(layer)
        heads = upstream.head_num if kind == "mha" else 1
        k = torch.randn(len(loc), heads, like_k.shape[-1])
        v = torch.randn(len(loc), heads, like_v.shape[-1])
        scales = {"k_scale": 0.5, "v_scale": 1.7} if kind == "mha" and rng.random() < 0.5 else {}
        upstream.set_kv_buffer(SimpleNamespace(layer_id=layer), loc, k.clone(), v.clone(), **scales)
        pool.set_kv_buffer(layer, loc, k, v, **scales)
        if kind == "mla" and pool.index_k_buffer is not None:
            index_k = torch.randn(len(loc), 1, pool.index_k_buffer.shape[-1])
            upstream.set_index_k_buffer(layer, loc, index_k)
            pool.set_index_k_buffer(layer, loc, index_k)
            row = layer - pool.start_layer
            assert layer_bytes(pool.index_k_buffer[row]) == layer_bytes(
                upstream.index_k_buffer[row]
            )
        for other in range(pool.start_layer, pool.start_layer + pool.num_layers):
            assert layer_bytes(pool.get_key_buffer(other)) == layer_bytes(
                upstream.get_key_buffer(other)
            )
            assert layer_bytes(pool.get_value_buffer(other)) == layer_bytes(
                upstream.get_value_buffer(other)
            )


def test_setup_state_kv_args(sglang, rng):
    for _ in range(60):
        upstream, pool, _ = make_pools(sglang, rng, use_fia=False)
        draft_upstream, draft, _ = make_pools(sglang, rng, use_fia=False)
        with_draft, total = bool(rng.integers(2)), int(rng.integers(1, 62))
        theirs, ours = cpattn.transfer.KVArgs(), cpattn.transfer.KVArgs()
        theirs.kv_data_ptrs = upstream.get_contiguous_buf_infos()[0]
        sglang.disaggregation.setup_state_kv_args(
            theirs, upstream, draft_upstream if with_draft else None, total
        )
        cpattn.transfer.setup_state_kv_args(ours, pool, draft if with_draft else None, total)
        assert hasattr(ours, "kv_buf_groups") == hasattr(theirs, "kv_buf_groups")
        for name in ("kv_buf_groups", "total_kv_layers", "hidden_kv_layers", "draft_kv_layers"):
            if hasattr(theirs, name):
                assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("state_types", "state_data_ptrs", "state_data_lens", "state_item_lens"):
            assert getattr(ours, name) == getattr(theirs, name) == []


def random_kv_args(
    sglang: SimpleNamespace, rng: np.random.Generator, *, is_mla: bool
) -> tuple[SimpleNamespace, list[int]]:
    """What a prefill stage registers, and the addresses of a decode server's buffers."""
    num_layers, stage = random_stage(rng)
    groups = str(rng.choice(["KV", "KVI"])) if is_mla else "KV"
    page_bytes = {"K": 512, "V": 512 if rng.random() < 0.5 else 96, "I": 64}
    with_draft = stage.stop == num_layers and rng.random() < 0.3
    draft = int(rng.integers(0, 3))
    held = kv_list(stage, groups, draft if with_draft else 0)
    addrs = 2**48 + 2**32 * (1 + rng.permutation(200).astype(np.int64))
    kv_args = SimpleNamespace(
        engine_rank=0,
        page_size=8,
        prefill_start_layer=stage.start,
        prefill_end_layer=stage.stop,
        kv_data_ptrs=addrs[: len(held)].tolist(),
        kv_data_lens=[4096 * page_bytes[name.removeprefix("draft ")[0]] for name in held],
        kv_item_lens=[page_bytes[name.removeprefix("draft ")[0]] for name in held],
        kv_layer_ids=None,
        kv_buf_groups=len(groups),
        total_kv_layers=num_layers,
        hidden_kv_layers=num_layers,
        draft_kv_layers=draft,
        mla_compression_ratios=None,
    )
    if not knows_drafts(sglang):
        del kv_args.hidden_kv_layers
    return kv_args, addrs[100 : 100 + len(kv_list(range(num_layers), groups, draft))].tolist()


@pytest.mark.parametrize("is_mla", [False, True])
def test_plan_send_kvcache(sglang, rng, is_mla):
    for _ in range(1000):
        kv_args, dst_ptrs = random_kv_args(sglang, rng, is_mla=is_mla)
        pp_size, is_last = int(rng.integers(1, 3)), bool(rng.integers(2))
        num_pages = int(rng.integers(0, 30))
        src, dst = unique_pages(rng, num_pages, 4096), unique_pages(rng, num_pages, 60)
        sglang.parallel.pp_group.is_last_rank = is_last
        manager = make_manager(sglang, kv_args=kv_args, pp_size=pp_size, is_mla_backend=is_mla)
        sent = outcome(manager.send_kvcache, "s", src, dst_ptrs, dst, ImmediateExecutor())
        planned = outcome(
            cpattn.transfer.plan_send_kvcache,
            kv_args,
            dst_ptrs,
            src,
            dst,
            pp_size=pp_size,
            is_mla=is_mla,
            is_last_rank=is_last,
            compat=True,
        )
        assert sent == 0
        assert blocks(planned) == manager.engine.blocks


def joined(blocks: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """With neighbours that continue each other on both sides made one."""
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
        kv_args, dst_ptrs = random_kv_args(sglang, rng, is_mla=False)
        num_entries = len(kv_args.kv_data_ptrs)
        kv_args.engine_rank = rank
        kv_args.page_size = page_size
        kv_args.kv_item_lens = [src_len] * num_entries
        kv_args.kv_data_lens = [src_len * 4096] * num_entries
        kv_args.kv_head_num, kv_args.total_kv_head_num = max(heads // prefill_tp, 1), heads
        num_pages = int(rng.integers(0, 10))
        src, dst = unique_pages(rng, num_pages, 4096), unique_pages(rng, num_pages, 60)
        manager = make_manager(sglang, kv_args=kv_args, attn_tp_size=prefill_tp, pp_size=2)
        sent = outcome(
            manager.send_kvcache_slice,
            *("s", src, dst_ptrs, dst, dst_rank, decode_tp, dst_len, ImmediateExecutor()),
        )
        planned = outcome(
            cpattn.transfer.plan_send_kvcache_slice,
            kv_args,
            dst_ptrs,
            src,
            dst,
            dst_tp_rank=dst_rank,
            dst_attn_tp_size=decode_tp,
            dst_kv_item_len=dst_len,
            attn_tp_size=prefill_tp,
            pp_size=2,
            compat=True,
        )
        assert sent == 0
        assert joined(blocks(planned)) == joined(manager.engine.blocks)


def random_buffers(rng: np.random.Generator, num_buffers: int) -> tuple[list[int], list[int]]:
    """Addresses, and bytes of an item."""
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
        sent = outcome(manager.send_aux, request, src_index, dst_ptrs)
        if sent == "refused: short destination":
            continue
        planned = cpattn.transfer.plan_send_aux(
            kv_args, dst_ptrs, src_index, dst_index, compat=True
        )
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
            prefill_start_layer=0,
            state_types=types,
            state_data_ptrs=ptrs,
            state_item_lens=item_lens,
            state_dim_per_tensor=no_ids,
            state_layer_ids=no_ids,
        )
        manager = make_manager(
            sglang,
            kv_args=kv_args,
            state_tp_size=1,
            request_status={7: sglang.base.KVPoll.Transferring},
            state_strides_validated={"s"},
        )
        request = SimpleNamespace(mooncake_session_id="s", room=7, dst_state_indices=dst_indices)
        registered = SimpleNamespace(
            dst_state_data_ptrs=dst_ptrs,
            dst_state_item_lens=item_lens,
            dst_state_dim_per_tensor=no_ids,
            dst_state_layer_ids=no_ids,
            dst_attn_tp_size=1,
            dst_tp_rank=0,
        )
        assert manager.maybe_send_extra(request, src_indices, ImmediateExecutor(), registered) == 0
        planned = cpattn.transfer.plan_send_state(
            kv_args, dst_ptrs, src_indices, dst_indices, compat=True
        )
        assert blocks(planned) == manager.engine.blocks
