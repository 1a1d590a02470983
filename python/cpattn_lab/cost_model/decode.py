# SPDX-License-Identifier: Apache-2.0
"""Step of decoding over sharded pools: one token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpattn import _core
from cpattn._arguments import items
from cpattn._limits import check_integer, check_kind
from cpattn.context_parallel.exchanges import LSE_BYTES

from ..limits import check_seq_lens
from .counts import check_placing
from .exchanged import along_rails, heads_of
from .layer import ITEM_BYTES, AttentionLayer, Ints
from .placement import pages_per_rank, pairs_by_owner, stripes
from .rates import Rates, Seconds, attention_seconds, merge_seconds
from .timing import crowding
from .work import PACKING_ROWS

_EXCHANGES = ("all_to_all", "gather")


@dataclass(frozen=True)
class DecodePrediction:
    """Prediction of a decode step over ranks with sharded keys; seconds and bytes of one layer.

    Attributes
    ----------
    placement, out_heads : str
        Arguments of `predict_decode`.
    exchange : str
        The argument, or the choice of "auto".
    cp_size, ranks_per_host : int
        Number of ranks, and ranks per host.
    layer : AttentionLayer
        Layer of the prediction.
    num_sequences : int
        Number of sequences, each with one new token.
    pool_bytes : int
        Bytes of the pages of all sequences, in all layers, in the fullest pool of a rank.
    keys : array [cp_size], int64
        Keys of all sequences that each rank keeps and attends to.
    attention_seconds, exchange_seconds : arrays [cp_size], float64
        Seconds of each rank; the exchange includes merging partial results.
    sent_bytes, received_bytes : arrays [cp_size], int64
        Bytes of attention states between hosts.
    bias_bytes : array [cp_size], int64
        Bytes of biases that each rank reads.
    imbalance : float
        Keys of the most loaded rank over the mean.
    store_seconds : float
        Seconds to store new keys and values, on the rank that keeps most.
    single_rank_seconds : float
        Seconds of attention and store of the same layer on a single rank.
    alternatives : dict of str to float
        For "auto", the seconds of the slowest rank with each exchange.

    Examples
    --------
    >>> from cpattn_lab.cost_model import AttentionLayer, Rates, predict_decode
    >>> rates = Rates(gflops=900, gather_gb_per_s=10, latency_us=5, message_us=1)
    >>> step = predict_decode([131072] * 8, AttentionLayer(), rates, cp_size=8)
    >>> step.keys.tolist() == [131072] * 8, round(step.speedup, 1)
    (True, 7.9)
    """

    placement: str
    exchange: str
    out_heads: str
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
    bias_bytes: Ints
    imbalance: float
    store_seconds: float
    single_rank_seconds: float
    alternatives: dict[str, float]

    @property
    def layer_seconds(self) -> float:
        """Seconds of attention, exchange and store of one layer, on the slowest ranks."""
        slowest = self.attention_seconds.max() + self.exchange_seconds.max()
        return float(slowest) + self.store_seconds

    @property
    def model_seconds(self) -> float:
        """Seconds of a step through all layers."""
        return self.layer_seconds * self.layer.num_layers

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences per second of such steps."""
        return self.num_sequences / self.model_seconds

    @property
    def speedup(self) -> float:
        """Seconds of a single rank over those of all ranks."""
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
    exchange: str = "all_to_all",
    out_heads: str = "own",
) -> DecodePrediction:
    """Predict a step of decoding over sharded pools.

    Every rank has the queries of all sequences and attends to the keys that it keeps. It sends
    every other rank the states of that rank's heads, and the receiver merges them; with "gather",
    it sends the states of all heads. With B sequences, h_r query heads of rank r and N ranks, one
    per host, the bytes and seconds are::

        state      = v_head_dim * item + 4               item of state_dtype, and an LSE in float32
        sent_r     = B * (num_heads - h_r) * state       gather: B * num_heads * (N - 1) * state
        received_r = B * h_r * (N - 1) * state           gather: the same
        merged_r   = B * h_r * N rows                    gather: B * num_heads * N
        exchange   = 2 * (latency + (N - 1) * message) + max(sent, received) / gather_gb_per_s
                     + merged_r * v_head_dim * merge

    If every rank needs all heads, "all_to_all" has another round with merged outputs and LSE in the
    dtype of the layer: rank r sends ``B * h_r * (N - 1)`` and receives ``B * (num_heads - h_r)``.

    Ranks of a host merge their states first: N, r then count hosts, and rank k of a host sends to
    rank k of every other host, with "gather" its share of the heads. Keys of a new token stay on
    the rank that keeps them.

    Parameters
    ----------
    seq_lens : ints [bs]
        Tokens of each sequence including the new one, at least 1.
    layer : AttentionLayer
        Sizes and number of the layers.
    rates : Rates
        Speed of a rank.
    cp_size : int
        Number of ranks.
    placement : {"page_interleave", "token_interleave", "token_interleave:I"}
        Placement of keys on ranks.
    ranks_per_host : int
        Ranks that share the memory and wire of a host; a divisor of `cp_size`.
    cpus : int, optional
        CPUs of a host. If its ranks have more threads, computation slows down in proportion.
        Default: enough.
    state_dtype : {"float32", "bfloat16", "float16"}
        Dtype of the outputs that are sent to be merged.
    exchange : {"all_to_all", "gather", "auto"}
        Whether states go to the ranks of their heads, or all to every rank; "auto" is the choice
        of `ContextParallel.decode`, by received bytes.
    out_heads : {"own", "all"}
        Whether a rank gets its share of the heads, or all heads.

    Returns
    -------
    DecodePrediction
        Seconds of each rank and of the whole, bytes, and balance.

    Raises
    ------
    TypeError
        If a length or number is no integer.
    ValueError
        If there are no sequences, one is empty, a name is unknown, pools are replicated, or
        `ranks_per_host` does not divide `cp_size`.

    Examples
    --------
    >>> from cpattn_lab.cost_model import AttentionLayer, Rates, predict_decode
    >>> step = predict_decode([4096, 100], AttentionLayer(), Rates(gflops=900), cp_size=4)
    >>> step.keys                          # the short one fits into a page, of rank 0
    array([1124, 1024, 1024, 1024])
    >>> int(step.sent_bytes[0]) == 2 * 24 * (128 * 4 + 4)
    True
    """
    function = "predict_decode"
    check_kind(function, "layer", layer, AttentionLayer)
    check_kind(function, "rates", rates, Rates)
    check_placing(
        function, placement, exchange, cp_size, ranks_per_host, state_dtype, (*_EXCHANGES, "auto")
    )
    if out_heads not in ("own", "all"):
        raise ValueError(f"{function}: out_heads must be one of own, all, got {out_heads!r}")
    if placement == "replicated":
        raise ValueError(
            f"{function}: placement must be page_interleave or token_interleave, got 'replicated'"
        )
    if cpus is not None:
        check_integer(function, "cpus", cpus)
    listed = items(seq_lens, function, "seq_lens")
    for length in listed:
        check_integer(function, "seq_lens", length)
    lengths = np.asarray(listed, np.int64)
    if not lengths.size:
        raise ValueError(f"{function}: seq_lens must have a sequence, got none")
    check_seq_lens(function, lengths.tolist(), [1] * len(lengths))
    laid = stripes(placement, lengths, cp_size, layer.page_size)
    ones = np.ones_like(lengths)
    pairs = pairs_by_owner(ones, lengths, layer, laid)
    slower, slower_alone = (crowding(rates, ranks, cpus) for ranks in (ranks_per_host, 1))
    ways = {
        name: _exchanged(
            name, len(lengths), layer, rates, cp_size, ranks_per_host, state_dtype,
            out_heads == "all", slower,
        )
        for name in (_EXCHANGES if exchange == "auto" else (exchange,))
    }  # fmt: skip
    slowest = {name: float(seconds.max()) for name, (_, _, seconds) in ways.items()}
    taken = exchange
    if exchange == "auto":
        output = layer.v_dim * ITEM_BYTES[layer.dtype]
        taken, *_ = _core.choose_state_exchange(
            len(lengths), layer.num_heads, output, cp_size, out_heads == "all"
        )
    sent, received, seconds = ways[taken]
    keys = pairs.sum(1)
    owned = laid.count_below(lengths) - laid.count_below(lengths - 1)
    pages = pages_per_rank(placement, lengths, cp_size, layer.page_size)
    row_seconds = layer.kv_row_bytes / (1e9 * rates.store_gb_per_s)
    alone = np.minimum(lengths, layer.most_keys)[None]
    return DecodePrediction(
        placement=placement,
        exchange=taken,
        out_heads=out_heads,
        cp_size=cp_size,
        ranks_per_host=ranks_per_host,
        layer=layer,
        num_sequences=len(lengths),
        pool_bytes=int(pages.max()) * layer.page_size * layer.kv_row_bytes * layer.num_layers,
        keys=keys,
        attention_seconds=slower * _attention(pairs, layer, rates, lse=cp_size > 1),
        exchange_seconds=seconds,
        sent_bytes=sent,
        received_bytes=received,
        bias_bytes=keys * layer.num_heads * layer.bias_bytes,
        imbalance=float(keys.max() / keys.mean()),
        store_seconds=slower * int(owned.sum(1).max()) * row_seconds,
        single_rank_seconds=slower_alone
        * (float(_attention(alone, layer, rates)[0]) + len(lengths) * row_seconds),
        alternatives=slowest if exchange == "auto" else {},
    )


def _attention(pairs: Ints, layer: AttentionLayer, rates: Rates, *, lse: bool = False) -> Seconds:
    """Return the seconds of each rank, from its keys [ranks, bs] that each sequence sees.

    A step reads its keys in place: `read_rows` has the place of `pack_rows`.
    """
    keys, group = pairs.sum(1), layer.num_heads // layer.num_kv_heads
    return attention_seconds(
        replace(rates, pack_rows=rates.read_rows),
        layer,
        pairs=keys,
        rows=(pairs > 0).sum(1),
        heads=layer.num_heads,
        packed=keys * layer.num_kv_heads,
        longest=pairs.max(1) * (group + PACKING_ROWS),
        lse=lse,
    )


def _exchanged(
    exchange: str,
    num_sequences: int,
    layer: AttentionLayer,
    rates: Rates,
    cp_size: int,
    ranks_per_host: int,
    state_dtype: str,
    all_heads: bool,
    slower: float,
) -> tuple[Ints, Ints, Seconds]:
    """Return bytes [cp_size] sent to and received from other hosts, and seconds, of each rank.

    Rank k of a host sends its merged states to rank k of another host.
    """
    state = num_sequences * (layer.v_dim * ITEM_BYTES[state_dtype] + LSE_BYTES)
    if exchange == "gather":
        rails = heads_of(layer.num_heads, layer.num_heads, ranks_per_host)[0]
        heads = np.broadcast_to(rails, (cp_size // ranks_per_host, ranks_per_host))
        rounds = [_to_all(heads, state)]
        rail_heads = heads
    else:
        heads = heads_of(layer.num_heads, layer.num_heads, cp_size)[0].reshape(-1, ranks_per_host)
        received, sent = _to_all(heads, state)
        rounds = [(sent, received)]
        rail_heads = heads.sum(0)
        if all_heads:
            merged = num_sequences * (layer.v_dim * ITEM_BYTES[layer.dtype] + LSE_BYTES)
            rounds.append(_to_all(heads, merged))
    sent, received = (sum(moved, start=np.int64(0)) for moved in zip(*rounds, strict=True))
    parts = rail_heads * _parts(ranks_per_host) + heads * _parts(len(heads))
    merging = slower * merge_seconds(rates, layer, num_sequences * parts).ravel()
    return sent.ravel(), received.ravel(), _seconds(rounds, rates, slower) + merging


def _parts(number: int) -> int:
    """Return the number of partial results to merge: a single one needs no merge."""
    return number if number > 1 else 0


def _to_all(heads: Ints, state: int) -> tuple[Ints, Ints]:
    """Return sent and received bytes [hosts, ranks of a host] if all hosts get all heads."""
    sent, received = along_rails(lambda rail: _core.send_rows(rail, state, False), heads)
    return sent, received


def _seconds(rounds: Sequence[tuple[Ints, Ints]], rates: Rates, slower: float) -> Seconds:
    """Return the seconds of digests and each round of states, on the wire that a host shares."""
    num_hosts, ranks_per_host = rounds[0][0].shape
    peers = num_hosts - 1
    if not peers:
        return np.zeros(ranks_per_host)
    waits = 1e-6 * slower * (rates.latency_us + peers * rates.message_us) * (1 + len(rounds))
    wire = sum(np.maximum(sent.sum(1), received.sum(1)) for sent, received in rounds)
    return np.repeat(wire / (1e9 * rates.gather_gb_per_s) + waits, ranks_per_host)
