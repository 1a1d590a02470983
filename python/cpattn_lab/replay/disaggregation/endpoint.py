# SPDX-License-Identifier: Apache-2.0
"""Two ends of KV transfer: a decode process that receives, and prefill ranks that send."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cpattn.integrations.mooncake import MooncakeEngine
from cpattn.kv import PageInterleave
from cpattn.transfer.engine import TransferEngine
from cpattn.transfer.layout import KVLayout
from cpattn.transfer.planner import plan_kv_transfer
from cpattn.transfer.registration import register
from cpattn.transfer.sglang_0_5_23.args import KVArgs
from cpattn.transfer.sglang_0_5_23.send_state import plan_send_aux

from .handover import Delivery

AUX_BYTES = 64  # bytes of a slot: the first token as int64, and padding for alignment


@dataclass(frozen=True)
class Peer:
    """Receiving end in a decode process: everything that a sender needs to know about it."""

    session: str
    layout: dict[str, Any]  # layout of its KV buffers
    aux_addr: int


@dataclass(frozen=True)
class Transfer:
    """Record of a transfer from one rank after one batch."""

    num_blocks: int
    num_bytes: int
    plan_seconds: float
    seconds: float  # planning included


def start_engine(address: str) -> MooncakeEngine:
    """Start an engine of this process, which peers reach at an address of its host."""
    with _quiet():
        return MooncakeEngine(host=address)


def require_engine() -> None:
    """Raise ImportError or RuntimeError if `start_engine` would fail."""
    with _quiet():
        MooncakeEngine().close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of engines, which they write past Python; their exceptions say enough."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class Endpoint:
    """Pool and buffer of first tokens, registered with an engine until the exit.

    Page numbers count the pages in the pools of all ranks together; a rank may have a share of them
    (`PageInterleave`).
    """

    def __init__(self, engine: TransferEngine, pool: Any, layers: range, num_slots: int) -> None:
        self._engine = engine
        self.first_tokens = np.zeros((num_slots, AUX_BYTES // 8), np.int64)
        self._layout = KVLayout.from_pool(pool, layers=(layers.start, layers.stop))

    def __enter__(self) -> Endpoint:
        register(self._engine, self._layout, self.first_tokens)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def peer(self) -> Peer:
        """Return the data that senders need."""
        return Peer(self._engine.session_id, self._layout.to_dict(), self.first_tokens.ctypes.data)

    def connect(self, *peers: Peer) -> None:
        """Send to `peers` from now on; each has a share of the pages."""
        self._peers = [(peer.session, peer.aux_addr) for peer in peers]
        self._peer_layouts = [KVLayout.from_dict(peer.layout) for peer in peers]

    def send_pages(
        self, delivery: Delivery, cp_rank: int, cp_size: int, *, is_sharded: bool = False
    ) -> Transfer:
        """Send this rank's pages, or its share of the pages that all ranks of a stage have."""
        begin = time.perf_counter()
        src, dst = (pages.astype(np.int64) for pages in (delivery.src_pages, delivery.dst_pages))
        if is_sharded:
            mine, src = _pages_of(cp_rank, cp_size, src)
            dst = dst[mine]
            cp_rank, cp_size = 0, 1
        plans = []
        for i, layout in enumerate(self._peer_layouts):
            there, local = _pages_of(i, len(self._peers), dst)
            plan = plan_kv_transfer(
                self._layout,
                layout,
                src[there],
                local,
                cp_rank=cp_rank,
                cp_size=cp_size,
                cp_share="pages",
            )
            plans.append(plan)
        planned = time.perf_counter()
        for plan, (session, _) in zip(plans, self._peers, strict=True):
            plan.execute(self._engine, session)
        end = time.perf_counter()
        blocks, sent = sum(map(len, plans)), sum(plan.total_bytes for plan in plans)
        return Transfer(blocks, sent, planned - begin, end - begin)

    def send_first_tokens(self, slots: list[int]) -> None:
        """Send `slots` of ``first_tokens``, which tell the receiver that a prompt is complete."""
        own = self.first_tokens
        buffers = KVArgs(
            aux_data_ptrs=[own.ctypes.data], aux_data_lens=[own.nbytes], aux_item_lens=[AUX_BYTES]
        )
        for slot in slots:
            for session, addr in self._peers:
                plan_send_aux(buffers, [addr], slot, slot).execute(self._engine, session)


def _pages_of(
    rank: int, size: int, pages: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of a rank's pages in a list, and their numbers in its pool."""
    return PageInterleave(shard_size=size, page_size=1).filter_local(pages, rank)
