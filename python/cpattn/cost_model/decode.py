# SPDX-License-Identifier: Apache-2.0
"""A step of decoding over pools that are shared out: one token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._limits import check_integer, check_seq_lens
from .counts import check_placing
from .exchange import LSE_BYTES, split_heads
from .placement import pages_per_rank, pairs_by_owner, stripes
from .rates import Rates, Seconds, attention_seconds
from .timing import crowding
from .work import ITEM_BYTES, PACKING_ROWS, AttentionLayer, Ints


@dataclass(frozen=True)
class DecodePrediction:
    """A step of decoding over ranks that share the keys; seconds and bytes of one layer.

    Attributes
    ----------
    placement : str
        As given to `predict_decode`.
    cp_size, ranks_per_host : int
        Number of ranks, and those of a host.
    layer : AttentionLayer
        What the work was counted for.
    num_sequences : int
        Sequences, each with one new token.
    pool_bytes : int
        Pages of all sequences, in all layers, in the pool of the rank that has most.
    keys : array [cp_size], int64
        That the rank keeps and attends to, of all sequences.
    attention_seconds, exchange_seconds : arrays [cp_size], float64
        Of each rank.
    sent_bytes, received_bytes : arrays [cp_size], int64
        States of attention between hosts.
    imbalance : float
        Keys of the most loaded rank over the mean.
    store_seconds : float
        Of the new keys and values that one rank keeps, where it keeps most.
    single_rank_seconds : float
        Attention and store of the same layer, by one rank alone.

    Examples
    --------
    >>> from cpattn.cost_model import AttentionLayer, Rates, predict_decode
    >>> rates = Rates(gflops=900, gather_gbps=10, latency_us=5, message_us=1)
    >>> step = predict_decode([131072] * 8, AttentionLayer(), rates, cp_size=8)
    >>> step.keys.tolist() == [131072] * 8, round(step.speedup, 1)
    (True, 8.0)
    """

    placement: str
    cp_size: int
    ranks_per_host: int
    layer: AttentionLayer
    num_sequences: int
    pool_bytes: int
    keys: Ints
    attention_seconds: Seconds
    exchange_seconds: Seconds
    sent_bytes: Ints
    received_bytes: Ints
    imbalance: float
    store_seconds: float
    single_rank_seconds: float

    @property
    def layer_seconds(self) -> float:
        """Attention, exchange and store of one layer, on the slowest ranks, in seconds."""
        slowest = self.attention_seconds.max() + self.exchange_seconds.max()
        return float(slowest) + self.store_seconds

    @property
    def model_seconds(self) -> float:
        """A step through all layers, in seconds."""
        return self.layer_seconds * self.layer.num_layers

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences in a second of such steps."""
        return self.num_sequences / self.model_seconds

    @property
    def speedup(self) -> float:
        """The seconds of one rank alone over those of all ranks."""
        return self.single_rank_seconds / self.layer_seconds


def predict_decode(
    seq_lens: Sequence[int] | Any,
    layer: AttentionLayer,
    rates: Rates,
    *,
    cp_size: int,
    placement: str = "page_interleave",
    ranks_per_host: int = 1,
    cpus: int | None = None,
    state_dtype: str = "float32",
) -> DecodePrediction:
    """Predict a step of decoding over pools that are shared out.

    Every rank has the queries of all sequences, attends to the keys that it keeps, and sends each
    other rank the states of that one's heads, which that one merges. With B sequences, h_r of the
    query heads on rank r and N ranks, in bytes and seconds, where each host has one rank::

        sent_r     = B * (num_heads - h_r) * (v_head_dim * item + 4)    item of state_dtype
        received_r = B * h_r * (N - 1) * (v_head_dim * item + 4)        and an LSE in float32
        exchange   = 2 * (latency + (N - 1) * message) + max(sent, received) / gather_gbps

    Ranks of a host merge theirs first: N, r are then hosts, and rank k of one sends to rank k of
    every other. Keys of the new token stay with the rank that keeps them.

    Parameters
    ----------
    seq_lens : ints [bs]
        Tokens of each sequence with the new one, at least 1.
    layer : AttentionLayer
        Sizes of the layers, and how many there are.
    rates : Rates
        What a rank computes and sends in a second.
    cp_size : int
        Number of ranks.
    placement : {"page_interleave", "token_interleave"}
        Which rank keeps which keys.
    ranks_per_host : int
        Ranks that share memory, and the wire of their host; a divisor of `cp_size`.
    cpus : int, optional
        CPUs of a host. If its ranks have more threads, computing takes so much longer. Default:
        enough.
    state_dtype : {"float32", "bfloat16", "float16"}
        Of the outputs that are sent to be merged.

    Returns
    -------
    DecodePrediction
        Seconds of each rank and of the whole, bytes, and balance.

    Raises
    ------
    TypeError
        For lengths and numbers that are no integers.
    ValueError
        For no sequences or empty ones, unknown names, replicated pools, and a `ranks_per_host`
        that does not divide `cp_size`.

    Examples
    --------
    >>> from cpattn.cost_model import AttentionLayer, Rates, predict_decode
    >>> step = predict_decode([4096, 100], AttentionLayer(), Rates(gflops=900), cp_size=4)
    >>> step.keys                          # the short one fits into a page, of rank 0
    array([1124, 1024, 1024, 1024])
    >>> int(step.sent_bytes[0]) == 2 * 24 * (128 * 4 + 4)
    True
    """
    function = "predict_decode"
    check_placing(function, placement, "gather", cp_size, ranks_per_host, state_dtype)
    if placement == "replicated":
        raise ValueError(
            f"{function}: placement must be page_interleave or token_interleave, got 'replicated'"
        )
    if cpus is not None:
        check_integer(function, "cpus", cpus)
    for length in seq_lens:
        check_integer(function, "seq_lens", length)
    lengths = np.asarray(seq_lens, np.int64)
    if not lengths.size:
        raise ValueError(f"{function}: seq_lens must have a sequence, got none")
    check_seq_lens(function, lengths.tolist(), [1] * len(lengths))
    laid = stripes(placement, lengths, cp_size, layer.page_size)
    ones = np.ones_like(lengths)
    pairs = pairs_by_owner(ones, lengths, layer, laid)
    slower, slower_alone = (crowding(rates, ranks, cpus) for ranks in (ranks_per_host, 1))
    sent, received = _states(len(lengths), layer, cp_size, ranks_per_host, state_dtype)
    keys = pairs.sum(1)
    owned = laid.count_below(lengths) - laid.count_below(lengths - 1)
    pages = pages_per_rank(placement, lengths, cp_size, layer.page_size)
    row_seconds = layer.kv_row_bytes / (1e9 * rates.store_gbps)
    alone = np.minimum(lengths, layer.most_keys)[None]
    return DecodePrediction(
        placement=placement,
        cp_size=cp_size,
        ranks_per_host=ranks_per_host,
        layer=layer,
        num_sequences=len(lengths),
        pool_bytes=int(pages.max()) * layer.page_size * layer.kv_row_bytes * layer.num_layers,
        keys=keys,
        attention_seconds=slower * _attention(pairs, layer, rates),
        exchange_seconds=_exchange_seconds(sent, received, rates, ranks_per_host, slower),
        sent_bytes=sent,
        received_bytes=received,
        imbalance=float(keys.max() / keys.mean()),
        store_seconds=slower * int(owned.sum(1).max()) * row_seconds,
        single_rank_seconds=slower_alone
        * (float(_attention(alone, layer, rates)[0]) + len(lengths) * row_seconds),
    )


def _attention(pairs: Ints, layer: AttentionLayer, rates: Rates) -> Seconds:
    """Seconds of each rank, by the keys [ranks, bs] of it that each sequence sees."""
    keys, group = pairs.sum(1), layer.num_heads // layer.num_kv_heads
    return attention_seconds(
        rates,
        layer,
        pairs=keys,
        rows=(pairs > 0).sum(1),
        heads=layer.num_heads,
        packed=keys * layer.num_kv_heads,
        longest=pairs.max(1) * (group + PACKING_ROWS),
    )


def _states(
    num_sequences: int, layer: AttentionLayer, cp_size: int, ranks_per_host: int, state_dtype: str
) -> tuple[Ints, Ints]:
    """[cp_size] bytes that each rank sends to other hosts, and receives from them.

    Rank k of a host sends what it merged for the heads of rank k of another.
    """
    state = layer.v_dim * ITEM_BYTES[state_dtype] + LSE_BYTES
    heads = split_heads(layer, cp_size)[0].reshape(-1, ranks_per_host)
    sent = (heads.sum(0) - heads) * num_sequences * state
    received = heads * (len(heads) - 1) * num_sequences * state
    return sent.ravel(), received.ravel()


def _exchange_seconds(
    sent: Ints, received: Ints, rates: Rates, ranks_per_host: int, slower: float
) -> Seconds:
    """Digests, then states; over the wire that the ranks of a host share."""
    by_host = (part.reshape(-1, ranks_per_host).sum(1) for part in (sent, received))
    wire = np.maximum(*by_host) / (1e9 * rates.gather_gbps)
    peers = len(wire) - 1
    if peers:
        wire = wire + 2e-6 * slower * (rates.latency_us + peers * rates.message_us)
    return np.repeat(wire, ranks_per_host)
