# SPDX-License-Identifier: Apache-2.0
"""Speed of a rank's computation and exchange, and the resulting seconds of work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpattn._limits import check_integer

from ..limits import check_number
from .layer import AttentionLayer
from .work import PACKING_ROWS, Numbers, RankWork

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Speed of a rank's computation and exchange, and the resulting seconds of work.

    The defaults of the exchange are those of gloo over 10 Gbit/s.

    Attributes
    ----------
    gflops : float
        Floating-point operations of the products of attention, by all threads of a rank, in
        10^9 per second.
    threads : int
        Threads of a rank, at least 1. With fewer items of work than threads, some threads are idle.
    pack_rows : float
        Cost of packing one key and value, as rows of products with them.
    row_keys : float
        Cost of one row of queries besides its products (loading, masking, writing), as keys.
    call_us : float
        Cost of an attention call before any product, in microseconds.
    lse_share : float
        Cost of the LSE of rows, as a share of their products. Partial results need it.
    merge_ns : float
        Nanoseconds of one thread to copy and merge an element of a partial result.
    gather_gb_per_s : float
        10^9 bytes per second into a rank and, at the same time, out of it, over all peers.
    latency_us : float
        Microseconds of one exchange among all ranks; a gather is two, of digests and of rows.
    message_us : float
        Microseconds per peer in an exchange, for one message to and one from it.
    store_gb_per_s : float
        10^9 bytes of keys and values per second from the receive buffer into the pool.
    exchange_cpu_gb_per_s : float
        10^9 bytes that a rank sends and receives per second of its CPU time. On hosts without idle
        CPUs attention waits for it.
    read_rows : float
        Cost of reading one key and value in a decode step, which packs none, as rows of products.

    Raises
    ------
    TypeError
        If a rate is no number, or `threads` is no integer.
    ValueError
        If `threads` is below 1, a cost is negative, or a rate is not positive and finite.

    Examples
    --------
    >>> from cpattn_lab.cost_model import AttentionLayer, Rates, rank_work
    >>> rates, layer = Rates(gflops=900, gather_gb_per_s=10), AttentionLayer()
    >>> work = rank_work([32768], [32768], cp_size=8, layer=layer)
    >>> attention, gather = rates.attention_seconds(work, layer), rates.gather_seconds(work)
    >>> round(float(attention.max()), 3), round(float(gather.max()), 3)
    (1.245, 0.012)
    """

    gflops: float
    threads: int = 1
    pack_rows: float = 2 * PACKING_ROWS  # memory doubles their cost
    row_keys: float = 75.0
    call_us: float = 6.0
    lse_share: float = 0.0  # sums are part of the products if kernels have no tiles
    merge_ns: float = 2.7  # one thread of an AMD EPYC
    gather_gb_per_s: float = 1.25
    latency_us: float = 200.0
    message_us: float = 20.0
    store_gb_per_s: float = 4.0
    exchange_cpu_gb_per_s: float = 2.5
    read_rows: float = 2 * PACKING_ROWS  # of many threads, which share the memory; else 10 to 12

    def __post_init__(self) -> None:
        check_integer("Rates", "threads", self.threads)
        for name in ("gflops", "gather_gb_per_s", "store_gb_per_s", "exchange_cpu_gb_per_s"):
            check_number("Rates", name, getattr(self, name))
        costs = ("pack_rows", "read_rows", "row_keys", "call_us", "lse_share", "merge_ns")
        for name in (*costs, "latency_us", "message_us"):
            check_number("Rates", name, getattr(self, name), positive=False)

    def attention_seconds(self, work: RankWork, layer: AttentionLayer) -> Seconds:
        """Predict the attention of one layer.

        The time is ``call + max(all rows * keys, threads * the longest item) / flops``.

        Parameters
        ----------
        work : RankWork
            Work of one batch.
        layer : AttentionLayer
            Layer for which the work was counted.

        Returns
        -------
        array [cp_size], float64
            Seconds of each rank; 0 for one without new tokens.
        """
        return attention_seconds(
            self,
            layer,
            pairs=work.pairs,
            rows=work.tokens,
            heads=layer.num_heads,
            packed=work.packed_keys * layer.num_kv_heads,
            longest=work.longest_item,
        )

    def gather_seconds(self, work: RankWork) -> Seconds:
        """Predict the exchange of keys and values in one layer.

        Parameters
        ----------
        work : RankWork
            Work of one batch.

        Returns
        -------
        array [cp_size], float64
            Seconds of each rank; 0 for a single one.
        """
        peers = len(work.tokens) - 1
        if not peers:
            return np.zeros(1)
        wire = np.maximum(work.sent_bytes, work.received_bytes) / (1e9 * self.gather_gb_per_s)
        return wire + 2e-6 * (self.latency_us + peers * self.message_us)

    def store_seconds(self, work: RankWork, layer: AttentionLayer) -> float:
        """Predict the time to write the new keys and values of one layer into the pool of a rank.

        Parameters
        ----------
        work : RankWork
            Work of one batch.
        layer : AttentionLayer
            Layer for which the work was counted.

        Returns
        -------
        float
            Seconds, equal on every rank, since each writes the rows of all ranks.
        """
        return float(work.tokens.sum()) * layer.kv_row_bytes / (1e9 * self.store_gb_per_s)


def attention_seconds(
    rates: Rates,
    layer: AttentionLayer,
    *,
    pairs: Numbers,
    rows: Numbers,
    heads: Numbers,
    packed: Numbers,
    longest: Numbers,
    calls: int = 1,
    lse: bool = False,
) -> Seconds:
    """Return seconds of each rank: ``calls * call + max(work, threads * longest) * flop / gflops``.

    ``work = (pairs + row_keys * rows) * heads + pack_rows * packed`` counts products of a row with
    a key, each ``flop = 2 * (head_dim + v_head_dim)``. `pairs` and `rows` are for one of the rank's
    query `heads`, `packed` are keys of all its KV heads. With `lse`, pairs and the longest item
    count ``1 + lse_share`` times. 0 for a rank without rows.
    """
    per_pair = 2 * layer.dims / (1e9 * rates.gflops)  # the rate is of all threads
    summed = 1 + rates.lse_share * lse
    products = (summed * pairs + rates.row_keys * rows) * heads
    shared = np.maximum(products + rates.pack_rows * packed, summed * longest * rates.threads)
    busy = np.asarray(rows * heads > 0)
    return np.where(busy, 1e-6 * rates.call_us * calls + shared * per_pair, 0.0)


def merge_seconds(rates: Rates, layer: AttentionLayer, merged_rows: Numbers) -> Seconds:
    """Return the seconds of all threads to merge rows of partial results, each of one head."""
    each = 1e-9 * rates.merge_ns * layer.v_dim / rates.threads
    return np.asarray(each * merged_rows, np.float64)
