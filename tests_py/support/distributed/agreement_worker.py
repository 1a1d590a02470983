# SPDX-License-Identifier: Apache-2.0
"""Ranks that agree on a few numbers, and count the threads that this takes them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from cpattn.distributed.transport import exchange as exchanges
from cpattn.distributed.transport import waiting
from cpattn.distributed.transport.exchange import RowExchange
from support.time_limits import PATIENCE


def run_agreements(rank: int) -> list[dict[str, Any]]:
    """What is told, and threads begun: by messages in time, ones that are missed, beside rows."""
    exchange = RowExchange(dist.group.WORLD)
    with exchange.agreement("topology", (0,) * 6):  # versions
        pass
    return [_told(exchange, rank, case) for case in ("in time", "missed", "beside rows", "in time")]


def _told(exchange: RowExchange, rank: int, case: str) -> dict[str, Any]:
    begin = waiting.threading.Thread
    missed = (lambda ends: False) if case == "missed" else waiting.have_come
    with (
        mock.patch.object(waiting, "_PATIENT", PATIENCE),  # as long as a busy machine takes
        mock.patch.object(exchanges, "have_come", missed),
        mock.patch.object(waiting.threading, "Thread", side_effect=begin) as threads,
    ):
        if case == "beside rows":
            exchange.begin_ahead("attend", [1] * exchange.size, [torch.full((1, 4), rank)], 0)
        answers = [exchange.told(case, [rank, turn, 0]) for turn in range(5)]
        ahead = [column[:, 0].tolist() for column in exchange.end_ahead()]
    return {"told": answers, "threads": threads.call_count, "ahead": ahead}
