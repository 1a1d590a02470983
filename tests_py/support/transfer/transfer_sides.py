# SPDX-License-Identifier: Apache-2.0
"""The two ends of a transfer: what a prefill and a decode process do for one case."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from cpattn.transfer import (
    KVArgs,
    KVLayout,
    KVSendCursor,
    TransferPlan,
    decode_targets,
    fill_kv_args,
    plan_kv_links,
    plan_send_aux,
    plan_send_kvcache,
    plan_send_kvcache_slice,
    plan_send_state,
    setup_state_kv_args,
)
from support.transfer.transfer_cases import CANARY, SCRATCH, Case, RankPools, Server


def page_window(server: Server, pages: np.ndarray, start: int, end: int) -> tuple[np.ndarray, int]:
    """The pages of tokens [start, end), and the token that the first of them begins with."""
    tokens = server.page_size * server.dcp_size
    first = start // tokens
    return pages[first : -(-end // tokens)], first * tokens


# Calls for the processes of `transfer_processes`.


def prepare(state: Any, case: Case) -> str:
    state.side = DecodeSide(state.engine)
    return state.side.prepare(case)


def finish(state: Any) -> list[str]:
    return state.side.finish()


def send(state: Any, case: Case, session: str, peers: str) -> None:
    send_prompt(state.engine, case, session, peers)


@contextlib.contextmanager
def registered(engine: Any, pools: list[RankPools]) -> Iterator[None]:
    regions = [region for rank_pools in pools for region in rank_pools.regions()]
    addrs = [addr for addr, _ in regions]
    assert engine.register(addrs, [size for _, size in regions]) == 0
    try:
        yield
    finally:
        code = engine.unregister(addrs)
    assert code == 0


class DecodeSide:
    """Registers pools full of canaries and later says which pages are not as they should be."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.registration = contextlib.ExitStack()

    def prepare(self, case: Case) -> str:
        """What senders need to know of all ranks, as JSON."""
        self.case = case
        self.pools = [RankPools(case, case.decode, rank) for rank in case.decode.ranks]
        for pools in self.pools:
            pools.fill(CANARY)
        self.registration.enter_context(registered(self.engine, self.pools))
        return json.dumps([describe(pools) for pools in self.pools])

    def finish(self) -> list[str]:
        """Unregister, and name the pages whose bytes differ from what the case says."""
        self.registration.close()
        wrong = []
        for pools in self.pools:
            expected = expected_pools(self.case, pools).checksums()
            got = pools.checksums()
            wrong += [
                f"{pools.rank} {key}: page {page}"
                for key in got
                for page, sums in enumerate(zip(expected[key], got[key], strict=True))
                if sums[0] != sums[1]
            ]
        return wrong


def expected_pools(case: Case, like: RankPools) -> RankPools:
    """What a decode rank has to hold after the transfer, computed without any plan."""
    pools = RankPools(case, case.decode, like.rank)
    pools.fill(CANARY)
    prefill_has_draft = case.prefill.draft_layers > 0
    pools.place_metadata()
    for is_draft in (False, True):
        if prefill_has_draft or not is_draft:
            pools.place_prompt(np.arange(case.prefix, case.num_tokens), is_draft=is_draft)
            if case.sends_whole_pages:  # with what the rest of the last page held
                pools.place_tail(SCRATCH, is_draft=is_draft)
    return pools


def send_prompt(engine: Any, case: Case, session: str, peers: str) -> None:
    """What a prefill server does, over all links and in the chunks of the case."""
    pools = [RankPools(case, case.prefill, rank) for rank in case.prefill.ranks]
    for rank_pools in pools:
        rank_pools.fill(SCRATCH)
        rank_pools.place_prompt(np.arange(case.num_tokens))
        rank_pools.place_metadata()
    destinations = json.loads(peers)
    make_plans = layout_plans if case.planner == "layouts" else engine_plans
    plans = make_plans(case, pools, destinations)
    plans += metadata_plans(case, pools[-1], destinations)  # behind the last chunk
    if case.planner == "layouts":  # engines send what several ranks hold several times
        assert_no_byte_is_sent_twice(plans)
    with registered(engine, pools):
        for plan in plans:
            status = plan.execute(engine, session)
            assert status == 0, status
            assert status.bytes_done == plan.total_bytes


def layout_plans(
    case: Case, sources: list[RankPools], destinations: list[dict[str, Any]]
) -> list[TransferPlan]:
    """Of each chunk over all links, of each rank of the context-parallel groups."""
    src_layouts = [pools.layout() for pools in sources for _ in range(case.cp_size)]
    dst_layouts = [KVLayout.from_dict(peer["layout"]) for peer in destinations]
    plans = []
    for start, end in case.sends():
        src_pages, src_start = page_window(case.prefill, case.pages(case.prefill), start, end)
        dst_pages, dst_start = page_window(case.decode, case.pages(case.decode), start, end)
        links = plan_kv_links(
            src_layouts,
            dst_layouts,
            [src_pages] * len(src_layouts),
            [dst_pages] * len(dst_layouts),
            src_start=src_start,
            dst_start=dst_start,
            first_token=start,
            num_tokens=end - start,
            cp_ranks=[*range(case.cp_size)] * len(sources),
            cp_size=case.cp_size,
            cp_share=case.cp_share,
        )
        plans += [link.plan for link in links]
    return plans


def engine_plans(
    case: Case, sources: list[RankPools], destinations: list[dict[str, Any]]
) -> list[TransferPlan]:
    """The same by the functions that engines have; they know buffers by their position."""
    return [
        plan
        for src, dst in product(sources, destinations)
        for plan in engine_link_plans(case, src, dst)
    ]


def engine_link_plans(case: Case, src: RankPools, dst: dict[str, Any]) -> list[TransferPlan]:
    prefill, decode = case.prefill, case.decode
    is_mla = not case.model.num_kv_heads
    targets = decode_targets(
        dst["tp_rank"],
        prefill_tp_size=prefill.tp_size,
        decode_tp_size=decode.tp_size,
        is_mla=is_mla,
    )
    if src.rank.tp not in targets.ranks:
        return []
    compat = case.planner == "compat"
    options: dict[str, Any] = {
        "pp_size": len(prefill.stages),
        "is_last_rank": src.rank.pp == len(prefill.stages) - 1,
        "compat": compat,
    }
    if is_mla or prefill.tp_size == decode.tp_size:
        plan_send = partial(plan_send_kvcache, is_mla=is_mla, **options)
    else:
        plan_send = partial(
            plan_send_kvcache_slice,
            dst_tp_rank=dst["tp_rank"],
            dst_attn_tp_size=decode.tp_size,
            dst_kv_item_len=dst["item_len"],
            attn_tp_size=prefill.tp_size,
            **options,
        )
    args = kv_args(case, src)
    cursor = KVSendCursor(case.num_tokens, prefill.page_size, case.prefix, compat=compat)
    slots = prefill.slots(src.rank, case.pages(prefill), np.arange(case.num_tokens))
    dst_pages = page_window(decode, case.pages(decode), case.prefix, case.num_tokens)[0]
    chunks = [cursor.advance(computed) for computed in case.chunks]
    chunks.append(cursor.advance(case.num_tokens, last_chunk=True))
    return [
        plan_send(args, dst["ptrs"], *chunk.select(slots, dst_pages)) for chunk in chunks if chunk
    ]


def metadata_plans(
    case: Case, src: RankPools, destinations: list[dict[str, Any]]
) -> list[TransferPlan]:
    """All that goes to a destination behind the KV cache, from one of the sources."""
    args = kv_args(case, src)
    src_slot, dst_slot = case.slot(case.prefill), case.slot(case.decode)
    return [
        plan
        for dst in destinations
        for plan in (
            plan_send_state(args, [dst["mamba"]], [[src_slot]], [[dst_slot]]),
            plan_send_aux(args, dst["aux"], src_slot, dst_slot),
        )
    ]


def kv_args(case: Case, src: RankPools) -> KVArgs:
    """What an engine says of a prefill rank."""
    args = KVArgs(engine_rank=src.rank.tp, total_kv_head_num=case.model.num_kv_heads)
    num_layers = len(case.model.layer_ids)
    fill_kv_args(args, src.pool, src.draft_pool, total_kv_layers=num_layers)
    setup_state_kv_args(args, src.pool, src.draft_pool, num_layers)
    aux, mamba = src.metadata["aux"], src.metadata["mamba"]
    args.aux_data_ptrs, args.aux_item_lens = addresses(aux), [slots[0].nbytes for slots in aux]
    args.state_types, args.state_data_ptrs = ["mamba"], [addresses(mamba)]
    args.state_item_lens = [[slots[0].nbytes for slots in mamba]]
    return args


def describe(pools: RankPools) -> dict[str, Any]:
    """What senders need to know of a decode rank."""
    rows = list(pools.buffers.values())
    return {
        "layout": pools.layout().to_dict(),
        "tp_rank": pools.rank.tp,
        "ptrs": addresses(rows),
        "item_len": rows[0].nbytes // pools.server.num_pages,
        **{kind: addresses(buffers) for kind, buffers in pools.metadata.items()},
    }


def addresses(arrays: list[np.ndarray]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def assert_no_byte_is_sent_twice(plans: list[TransferPlan]) -> None:
    begins = np.concatenate([plan.dst_addrs for plan in plans])
    lengths = np.concatenate([plan.lengths for plan in plans])
    order = np.argsort(begins)
    ends = (begins + lengths)[order]
    assert np.all(ends[:-1] <= begins[order][1:])
