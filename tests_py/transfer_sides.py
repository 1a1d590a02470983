# SPDX-License-Identifier: Apache-2.0
"""The two ends of a transfer: what a prefill and a decode process do for one case."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from cpattn import KVLayout, TransferPlan, plan_kv_transfer
from transfer_cases import CANARY, SCRATCH, Case, RankPools, Server


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


def send(state: Any, case: Case, session: str, layouts: str) -> dict[str, int]:
    return PrefillSide(state.engine).send(case, session, layouts)


@contextlib.contextmanager
def registered(engine: Any, pools: list[RankPools]) -> Iterator[None]:
    regions = [region for rank_pools in pools for region in rank_pools.regions()]
    addrs = [addr for addr, _ in regions]
    assert engine.register(addrs, [size for _, size in regions]) == 0
    yield
    assert engine.unregister(addrs) == 0


class DecodeSide:
    """Registers pools full of canaries and later says which pages are not as they should be."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.registration = contextlib.ExitStack()

    def prepare(self, case: Case) -> str:
        """The layouts of all ranks as JSON."""
        self.case = case
        self.pools = [RankPools(case, case.decode, rank) for rank in case.decode.ranks]
        for pools in self.pools:
            pools.fill(CANARY)
        self.registration.enter_context(registered(self.engine, self.pools))
        return json.dumps([pools.layout().to_dict() for pools in self.pools])

    def finish(self) -> list[str]:
        """Unregister, and name the pages whose bytes differ from what the case says."""
        self.registration.close()
        wrong = []
        for pools in self.pools:
            expected, got = (
                expected_pools(self.case, pools).page_checksums(),
                pools.page_checksums(),
            )
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
    for is_draft in (False, True):
        if prefill_has_draft or not is_draft:
            pools.place_prompt(np.arange(case.prefix, case.num_tokens), is_draft=is_draft)
            if case.sends_whole_pages:  # with what the rest of the last page held
                pools.place_tail(SCRATCH, is_draft=is_draft)
    return pools


class PrefillSide:
    """Holds the prompt, and sends it in the chunks of the case."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def send(self, case: Case, session: str, layouts: str) -> dict[str, int]:
        """Over all links; how many plans, blocks and bytes they took."""
        pools = [RankPools(case, case.prefill, rank) for rank in case.prefill.ranks]
        for rank_pools in pools:
            rank_pools.fill(SCRATCH)
            rank_pools.place_prompt(np.arange(case.num_tokens))
        destinations = [KVLayout.from_dict(layout) for layout in json.loads(layouts)]
        plans = [
            plan
            for start, end in case.sends()
            for rank_pools in pools
            for destination in destinations
            for plan in self.plans(case, rank_pools.layout(), destination, start, end)
        ]
        assert_no_byte_is_sent_twice(plans)
        with registered(self.engine, pools):
            for plan in plans:
                status = plan.execute(self.engine, session)
                assert status == 0, status
                assert status.bytes_done == plan.total_bytes
        return {
            "plans": len(plans),
            "blocks": sum(len(plan) for plan in plans),
            "bytes": sum(plan.total_bytes for plan in plans),
        }

    def plans(
        self, case: Case, src: KVLayout, dst: KVLayout, start: int, end: int
    ) -> list[TransferPlan]:
        """Of one link, one for each rank of the context-parallel group."""
        src_pages, src_start = page_window(case.prefill, case.pages(case.prefill), start, end)
        dst_pages, dst_start = page_window(case.decode, case.pages(case.decode), start, end)
        return [
            plan_kv_transfer(
                src,
                dst,
                src_pages,
                dst_pages,
                src_start=src_start,
                dst_start=dst_start,
                first_token=start,
                num_tokens=end - start,
                cp_rank=cp_rank,
                cp_size=case.cp_size,
                cp_share=case.cp_share,
            )
            for cp_rank in range(case.cp_size)
        ]


def assert_no_byte_is_sent_twice(plans: list[TransferPlan]) -> None:
    begins = np.concatenate([plan.dst_addrs for plan in plans])
    lengths = np.concatenate([plan.lengths for plan in plans])
    order = np.argsort(begins)
    ends = (begins + lengths)[order]
    assert np.all(ends[:-1] <= begins[order][1:])
