# SPDX-License-Identifier: Apache-2.0
"""Seconds, from what ranks have to do and how fast they do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .rates import Rates, Seconds
from .work import AttentionLayer, rank_work

Batch = tuple[Any, Any]  # extend_lens and seq_lens, int [bs]


@dataclass(frozen=True)
class Prediction:
    """One strategy over one number of ranks; seconds and bytes of one layer, summed over batches.

    Ranks wait for each other in every gather, so a layer takes as long as its slowest rank.

    Attributes
    ----------
    strategy : str
        As given to `predict`.
    cp_size : int
        Number of ranks.
    layer : AttentionLayer
        What the work was counted for.
    num_batches, new_tokens : int
        Batches, and the new tokens of all their sequences.
    pool_bytes : int
        Pages of the largest batch, in all layers; the same on every rank.
    pairs : array [cp_size], int64
        Pairs of a query token and a key that it sees, in one query head, of each rank.
    attention_seconds, gather_seconds : arrays [cp_size], float64
        Of each rank.
    sent_bytes, received_bytes : arrays [cp_size], int64
        Of each rank, without the digests that ranks compare before.
    imbalance : float
        Pairs of the most loaded rank of each batch over the mean of the ranks.
    store_seconds : float
        Of writing the keys and values of all ranks into the pool of one.
    slowest_attention_seconds, slowest_gather_seconds : float
        Of the slowest rank of each batch.
    single_rank_seconds : float
        Attention and store of the same layer, by one rank alone.

    Examples
    --------
    >>> from cpattn.cost_model import AttentionLayer, Rates, predict
    >>> rates = Rates(gflops=900, gather_gbps=10)
    >>> forecast = predict([([32768], [32768])], AttentionLayer(), rates, cp_size=8)
    >>> round(forecast.speedup, 1), round(forecast.efficiency, 2), round(forecast.model_seconds)
    (7.7, 0.97, 41)
    """

    strategy: str
    cp_size: int
    layer: AttentionLayer
    num_batches: int
    new_tokens: int
    pool_bytes: int
    pairs: NDArray[np.int64]
    attention_seconds: Seconds
    gather_seconds: Seconds
    sent_bytes: NDArray[np.int64]
    received_bytes: NDArray[np.int64]
    imbalance: float
    store_seconds: float
    slowest_attention_seconds: float
    slowest_gather_seconds: float
    single_rank_seconds: float

    @property
    def layer_seconds(self) -> float:
        """Attention, gather and store of one layer, on the slowest ranks, in seconds."""
        return self.slowest_attention_seconds + self.slowest_gather_seconds + self.store_seconds

    @property
    def model_seconds(self) -> float:
        """Attention, gather and store of all layers, in seconds."""
        return self.layer_seconds * self.layer.num_layers

    @property
    def speedup(self) -> float:
        """The seconds of one rank alone over those of all ranks."""
        return self.single_rank_seconds / self.layer_seconds

    @property
    def efficiency(self) -> float:
        """The speed-up over the number of ranks."""
        return self.speedup / self.cp_size

    @property
    def attention_share(self) -> float:
        """The part of the time of a layer that is attention, from 0 to 1."""
        return self.slowest_attention_seconds / self.layer_seconds


def predict(
    batches: Sequence[Batch],
    layer: AttentionLayer,
    rates: Rates,
    *,
    cp_size: int,
    strategy: str = "zigzag",
) -> Prediction:
    """Predict the time of attention, and of gathering its keys and values, over `cp_size` ranks.

    Parameters
    ----------
    batches : sequence of (extend_lens, seq_lens)
        New tokens of each sequence of a batch, and these with the cached ones before them.
    layer : AttentionLayer
        Sizes of the layers, and how many there are.
    rates : Rates
        What a rank computes and sends in a second.
    cp_size : int
        Number of ranks.
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias, as for `build_cp_metadata`.

    Returns
    -------
    Prediction
        Seconds of each rank and of the whole, bytes, and balance.

    Raises
    ------
    TypeError
        For lengths or a number of ranks that are no integers, and a strategy that is no str.
    ValueError
        For no batches or batches without new tokens, lengths that do not match, a number of ranks
        outside [1, 32768], and an unknown strategy.

    Examples
    --------
    >>> from cpattn.cost_model import AttentionLayer, Rates, predict
    >>> rates = Rates(gflops=900, gather_gbps=10)
    >>> forecast = predict([([32768], [32768])], AttentionLayer(), rates, cp_size=8)
    >>> forecast.imbalance, int(forecast.sent_bytes.max())
    (1.0, 117440512)
    """
    if not batches:
        raise ValueError("predict: batches must hold at least one batch")
    works = [
        rank_work(extends, lengths, cp_size=cp_size, strategy=strategy, layer=layer)
        for extends, lengths in batches
    ]
    alone = [
        rank_work(extends, lengths, cp_size=1, strategy="contiguous", layer=layer)
        for extends, lengths in batches
    ]
    if not any(work.pairs.any() for work in works):
        raise ValueError("predict: batches must have new tokens, got none")
    attention = [rates.attention_seconds(work, layer) for work in works]
    gather = [rates.gather_seconds(work) for work in works]
    store = sum(rates.store_seconds(work, layer) for work in works)
    mean_pairs = sum(work.pairs.mean() for work in works)
    return Prediction(
        strategy=strategy,
        cp_size=cp_size,
        layer=layer,
        num_batches=len(batches),
        new_tokens=int(sum(work.tokens.sum() for work in works)),
        pool_bytes=max(layer.pool_bytes(np.asarray(lengths)) for _, lengths in batches),
        pairs=np.sum([work.pairs for work in works], axis=0),
        attention_seconds=np.sum(attention, axis=0),
        gather_seconds=np.sum(gather, axis=0),
        sent_bytes=np.sum([work.sent_bytes for work in works], axis=0),
        received_bytes=np.sum([work.received_bytes for work in works], axis=0),
        imbalance=float(sum(work.pairs.max() for work in works) / mean_pairs),
        store_seconds=store,
        slowest_attention_seconds=float(sum(seconds.max() for seconds in attention)),
        slowest_gather_seconds=float(sum(seconds.max() for seconds in gather)),
        single_rank_seconds=store
        + float(sum(rates.attention_seconds(work, layer).max() for work in alone)),
    )
