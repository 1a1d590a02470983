# SPDX-License-Identifier: Apache-2.0
"""The two ends of KV transfer: a decode process that receives, prefill ranks that send."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...integrations.mooncake import MooncakeEngine
from ...transfer.engine import TransferEngine
from ...transfer.layout import KVLayout
from ...transfer.planner import plan_kv_transfer
from ...transfer.registration import register
from ...transfer.sglang_0_5_23.args import KVArgs
from ...transfer.sglang_0_5_23.send_state import plan_send_aux
from .handover import Delivery

AUX_BYTES = 64  # of a slot: the first token as int64, and room that engines align to


@dataclass(frozen=True)
class Peer:
    """Where a decode process receives: all that a sender needs to know of it."""

    session: str
    layout: dict[str, Any]  # of its KV buffers
    aux_addr: int


@dataclass(frozen=True)
class Transfer:
    """What one rank has sent behind one batch."""

    num_blocks: int
    num_bytes: int
    plan_seconds: float
    seconds: float  # planning included


def start_engine() -> MooncakeEngine:
    """An engine of this process."""
    with _quiet():
        return MooncakeEngine()


def require_engine() -> None:
    """ImportError, or RuntimeError, if `start_engine` would fail."""
    with _quiet():
        MooncakeEngine().close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of engines, which they write past Python; their exceptions say enough."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


class Endpoint:
    """A pool and a buffer of first tokens, registered with an engine until the exit."""

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
        """What senders are told."""
        return Peer(self._engine.session_id, self._layout.to_dict(), self.first_tokens.ctypes.data)

    def connect(self, peer: Peer) -> None:
        """Send to `peer` from now on."""
        self._peer = peer
        self._peer_layout = KVLayout.from_dict(peer.layout)

    def send_pages(self, delivery: Delivery, cp_rank: int, cp_size: int) -> Transfer:
        """Send this rank's share of the pages, of which every rank of a stage has all."""
        begin = time.perf_counter()
        plan = plan_kv_transfer(
            self._layout,
            self._peer_layout,
            delivery.src_pages,
            delivery.dst_pages,
            cp_rank=cp_rank,
            cp_size=cp_size,
            cp_share="pages",
        )
        planned = time.perf_counter()
        plan.execute(self._engine, self._peer.session)
        end = time.perf_counter()
        return Transfer(len(plan), plan.total_bytes, planned - begin, end - begin)

    def send_first_tokens(self, slots: list[int]) -> None:
        """Send what ``first_tokens`` has in `slots`: the sign that a prompt is complete."""
        own = self.first_tokens
        buffers = KVArgs(
            aux_data_ptrs=[own.ctypes.data], aux_data_lens=[own.nbytes], aux_item_lens=[AUX_BYTES]
        )
        for slot in slots:
            plan = plan_send_aux(buffers, [self._peer.aux_addr], slot, slot)
            plan.execute(self._engine, self._peer.session)
