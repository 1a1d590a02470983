# SPDX-License-Identifier: Apache-2.0
"""Rates at which a rank computes and exchanges, and the seconds that work takes at them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpattn._limits import check_integer, check_number

from .layer import AttentionLayer
from .work import PACKING_ROWS, Numbers, RankWork

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Rates at which a rank computes and exchanges, and the seconds that work takes at them.

    The defaults of the exchange are those of gloo over 10 Gbit/s.

    Attributes
    ----------
    gflops : float
        Floating-point operations of the products of attention, by all threads of a rank, in
        10^9 per second.
    threads : int
        Threads of a rank, at least 1. Fewer items of work than threads leave some of them idle.
    pack_rows : float
        What packing one key and value costs, as rows of products with them.
    row_keys : float
        What one row of queries costs besides its products (loading, masking, writing), as keys.
    call_us : float
        What a call of attention costs before any product, in microseconds.
    lse_share : float
        What the LSE of rows costs, as a share of their products. Partial results need it.
    merge_ns : float
        Nanoseconds in which one thread merges an element of a partial result, and copies it before.
    gather_gb_per_s : float
        10^9 bytes per second into a rank, and at the same time out of it, all peers together.
    latency_us : float
        Microseconds of one exchange among all ranks; a gather is two, of digests and of rows.
    message_us : float
        Microseconds for every peer in an exchange: there is one message to and one from it.
    store_gb_per_s : float
        10^9 bytes of keys and values per second from the receive buffer into the pool.

    Raises
    ------
    TypeError
        For rates that are no numbers, and threads that are no integer.
    ValueError
        For threads below 1, negative costs, and rates per second that are not positive and finite.

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
    pack_rows: float = 2 * PACKING_ROWS  # from memory they cost twice as much
    row_keys: float = 75.0
    call_us: float = 6.0
    lse_share: float = 0.0  # sums are a part of the products where kernels have no tiles
    merge_ns: float = 2.7  # one thread of an AMD EPYC
    gather_gb_per_s: float = 1.25
    latency_us: float = 200.0
    message_us: float = 20.0
    store_gb_per_s: float = 4.0

    def __post_init__(self) -> None:
        check_integer("Rates", "threads", self.threads)
        for name in ("gflops", "gather_gb_per_s", "store_gb_per_s"):
            check_number("Rates", name, getattr(self, name))
        costs = ("pack_rows", "row_keys", "call_us", "lse_share", "merge_ns")
        for name in (*costs, "latency_us", "message_us"):
            check_number("Rates", name, getattr(self, name), positive=False)

    def attention_seconds(self, work: RankWork, layer: AttentionLayer) -> Seconds:
        """Predict the attention of one layer.

        That is ``call + max(all rows * keys, threads * the longest item) / flops``.

        Parameters
        ----------
        work : RankWork
            The work of one batch.
        layer : AttentionLayer
            The one that the work was counted for.

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
            The work of one batch.

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
        """Predict how long a rank writes the new keys and values of one layer into its pool.

        Parameters
        ----------
        work : RankWork
            The work of one batch.
        layer : AttentionLayer
            The one that the work was counted for.

        Returns
        -------
        float
            Seconds, the same on every rank: each one writes those of all ranks.
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
    """Seconds of each rank: ``calls * call + max(work, threads * longest) * flop / gflops``.

    ``work = (pairs + row_keys * rows) * heads + pack_rows * packed`` is counted in products of a
    row with a key, each ``flop = 2 * (head_dim + v_head_dim)``. `pairs` and `rows` are those of one
    of the rank's query `heads`, `packed` are keys of all its KV heads. With `lse` pairs and the
    longest item count ``1 + lse_share`` times. 0 for a rank without rows.
    """
    per_pair = 2 * layer.dims / (1e9 * rates.gflops)  # on all threads
    summed = 1 + rates.lse_share * lse
    products = (summed * pairs + rates.row_keys * rows) * heads
    shared = np.maximum(products + rates.pack_rows * packed, summed * longest * rates.threads)
    busy = np.asarray(rows * heads > 0)
    return np.where(busy, 1e-6 * rates.call_us * calls + shared * per_pair, 0.0)


def merge_seconds(rates: Rates, layer: AttentionLayer, merged_rows: Numbers) -> Seconds:
    """Seconds of all threads for so many rows of partial results, each of one head."""
    each = 1e-9 * rates.merge_ns * layer.v_dim / rates.threads
    return np.asarray(each * merged_rows, np.float64)
