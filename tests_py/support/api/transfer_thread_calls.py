# SPDX-License-Identifier: Apache-2.0
"""Calls that plan a transfer, each as long as is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cpattn import transfer
from cpattn.transfer import KVEntry

Call = Callable[[], object]

RNG = np.random.default_rng(0)


def layouts(count: int = 1) -> list[transfer.KVLayout]:
    return [
        transfer.KVLayout(
            [
                KVEntry(layer, "k", False, ((16 + peer) << 32) + (layer << 26), 1 << 26, 64)
                for layer in range(61)
            ],
            page_size=4,
        )
        for peer in range(count)
    ]  # fmt: skip


def pages(n: int) -> Any:
    return RNG.permutation(1 << 17)[: 64 * n]


def plan_transfer(n: int) -> Call:
    (src, dst), some, others = layouts(2), pages(n), pages(n)
    return lambda: transfer.plan_kv_transfer(src, dst, some, others)


def plan_links(n: int) -> Call:
    (src, dst), some, others = layouts(2), pages(n), pages(n)
    return lambda: transfer.plan_kv_links([src], [dst], [some], [others])


def sender() -> transfer.KVArgs:
    ptrs = [(1 << 30) + i * 2**26 for i in range(122)]
    return transfer.KVArgs(
        kv_data_ptrs=ptrs, kv_item_lens=[64] * 122, kv_data_lens=[2**26] * 122, engine_rank=0,
        page_size=4, kv_head_num=2, prefill_start_layer=0,
    )  # fmt: skip


def plan_send(n: int) -> Call:
    args, some, others = sender(), pages(n), pages(n)
    to = [ptr + (1 << 40) for ptr in args.kv_data_ptrs]
    return lambda: transfer.plan_send_kvcache(args, to, some, others, pp_size=1, is_mla=True)


def plan_slice(n: int) -> Call:
    args, some, others = sender(), pages(n), pages(n)
    to = [ptr + (1 << 40) for ptr in args.kv_data_ptrs]
    return lambda: transfer.plan_send_kvcache_slice(
        args, to, some, others, dst_tp_rank=0, dst_attn_tp_size=2, dst_kv_item_len=32,
        attn_tp_size=1,
    )  # fmt: skip


def shard_share(some: Any) -> object:
    return transfer.filter_kv_indices_for_shard_rank(
        kv_indices=some, index_slice=slice(0, len(some)), shard_rank=1, shard_size=4
    )


def cp_share(some: Any) -> object:
    chunk = slice(0, len(some))
    return transfer.filter_kv_indices_for_cp_rank(transfer.KVSender(1, 4), some, chunk)


def send_indices(some: Any) -> object:
    striped = transfer.KVSender(kv_shard_rank=1, kv_shard_size=4)
    return transfer.plan_send_indices(striped, some, curr_idx=0, num_kv_indices=len(some))
