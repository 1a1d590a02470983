# SPDX-License-Identifier: Apache-2.0
"""Communication rates of a group and merge rates, for `cpattn_lab.cost_model.Rates`."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from cpattn.distributed.layers.partials import State, merged
from cpattn.distributed.layers.rows import put_rows
from cpattn.distributed.transport.exchange import RowExchange

_HEADS, _DIM = 8, 128
_ROW_BYTES = 2 * _HEADS * _DIM * 2  # keys and values in bfloat16
_MESSAGES = 32
_MERGED_ELEMENTS, _MERGED_PARTS = 16 << 20, 2  # 64 MiB in float32, like a prompt's


def measure_exchange(
    group: dist.ProcessGroup, *, rank_bytes: int = 16 << 20, repeats: int = 15
) -> dict[str, float]:
    """Time exchanges of one row and of `rank_bytes` of each rank; all ranks call it.

    Returns
    -------
    dict of str to float
        ``gather_gb_per_s``, ``latency_us``, ``message_us``, ``store_gb_per_s`` and
        ``exchange_cpu_gb_per_s``, the same on all ranks: medians, of the slowest rank. Empty for a
        group of one rank.
    """
    exchange = RowExchange(group)
    peers = exchange.size - 1
    if not peers:
        return {}

    def seconds(
        function: Callable[[], object], clock: Callable[[], float] = time.perf_counter
    ) -> float:
        function()  # set up connections and buffers
        times = []
        for _ in range(repeats):
            dist.barrier(group)
            begin = clock()
            function()
            times.append(clock() - begin)
        slowest = torch.tensor(median(times), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        return float(slowest)

    def exchanging(rows: int) -> Callable[[], object]:
        parts = [torch.zeros(rows, _HEADS * _DIM, dtype=torch.bfloat16) for _ in "kv"]
        everyone = [rows] * exchange.size
        return lambda: exchange.all_rows("measure", everyone, parts)

    rows = -(-rank_bytes // _ROW_BYTES)
    one_row, all_rows = seconds(exchanging(1)), seconds(exchanging(rows))
    cpu = max(seconds(exchanging(rows), time.process_time), 1e-6)
    message = seconds(lambda: _messages(group, _MESSAGES)) - seconds(lambda: _messages(group, 1))
    message = max(message, 0.0) / (_MESSAGES - 1) / peers
    # At least half of it is transfer time, even if a busy machine delayed a single row.
    wire = max(all_rows - one_row, all_rows / 2)
    return {
        "gather_gb_per_s": rows * _ROW_BYTES * peers / wire / 1e9,
        "latency_us": max(one_row - peers * message, 0.0) * 1e6,
        "message_us": message * 1e6,
        "store_gb_per_s": rows * _ROW_BYTES / seconds(_storing(rows)) / 1e9,
        "exchange_cpu_gb_per_s": 2 * rows * _ROW_BYTES * peers / cpu / 1e9,
    }


def measure_merge(
    num_heads: int, v_head_dim: int, dtype: torch.dtype, threads: int, *, repeats: int = 5
) -> float:
    """Return nanoseconds per thread and element to copy and merge a partial result.

    A layer does the same: each part is copied into row order, and merged in float32.
    """
    rows = -(-_MERGED_ELEMENTS // (num_heads * v_head_dim))
    part = torch.zeros(rows, num_heads, v_head_dim, dtype=dtype)
    lse, order = torch.zeros(rows, num_heads), torch.arange(rows)

    def merge() -> None:
        parts = []
        for _ in range(_MERGED_PARTS):
            out = part.new_zeros(part.shape)
            put_rows([out], order, [part])
            parts.append(State(out, lse))
        merged(parts, None)

    times, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        merge()
        for _ in range(repeats):
            begin = time.perf_counter()
            merge()
            times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return 1e9 * threads * min(times) / (_MERGED_PARTS * part.numel())


def _storing(rows: int) -> Callable[[], None]:
    """Return a function that stores received rows into pools as `ContextParallel.write_kv` does."""
    received, pool = torch.zeros(2, rows, _HEADS * _DIM, dtype=torch.bfloat16)
    slots = torch.arange(rows)

    def store() -> None:
        for _ in "kv":
            put_rows([pool], slots, [received])

    return store


def _messages(group: dist.ProcessGroup, number: int) -> None:
    """Exchange `number` small messages with each peer at a time."""
    here, there = torch.zeros(2, 64, dtype=torch.uint8)
    own = dist.get_rank(group)
    ranks = [dist.get_global_rank(group, r) for r in range(dist.get_world_size(group)) if r != own]
    pending = [dist.irecv(there, rank, group) for rank in ranks for _ in range(number)]
    pending += [dist.isend(here, rank, group) for rank in ranks for _ in range(number)]
    for work in pending:
        assert work
        work.wait()
