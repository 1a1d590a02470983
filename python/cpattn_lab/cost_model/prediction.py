# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds, from the work of ranks and their rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpattn._arguments import items
from cpattn._limits import check_integer, check_kind
from cpattn.context_parallel.exchanges import EXCHANGES

from .counts import BatchCounts, Mesh, check_mesh, check_placing, possible_exchanges
from .exchange import exchange_taken, work_of
from .exchanged import ExchangeWork
from .layer import AttentionLayer
from .rates import Rates, Seconds
from .timing import LayerSeconds, crowding, layer_seconds

Batch = tuple[Any, Any]  # extend_lens and seq_lens, int [bs]
OVERLAPS = ("none", "full", "ahead")


@dataclass(frozen=True)
class Prediction:
    """Prediction for one strategy and number of ranks; seconds and bytes of a layer over batches.

    Ranks wait for each other in every exchange, so a layer takes as long as its slowest rank.

    Attributes
    ----------
    strategy : str
        Argument of `predict`.
    cp_size : int
        Number of ranks.
    layer : AttentionLayer
        Layer of the prediction.
    num_batches, new_tokens : int
        Number of batches, and new tokens of all their sequences.
    pool_bytes : int
        Bytes of the pages of the largest batch, in all layers, in the fullest pool of a rank.
        Replicated pools are the same on every rank; ranks of a host share one.
    pairs : array [cp_size], int64
        Pairs of a query token and a visible key, in one query head, of each rank.
    attention_seconds, gather_seconds : arrays [cp_size], float64
        Seconds of each rank for attention, with merges of partial results, and for the exchange,
        whichever `exchange` names.
    sent_bytes, received_bytes : arrays [cp_size], int64
        Bytes of each rank, without digests.
    bias_bytes : array [cp_size], int64
        Bytes of biases that each rank reads, in its heads. Seconds include them if the rates were
        measured with biases, as `calibrate` does.
    imbalance : float
        Pairs of the most loaded rank of each batch over the mean of the ranks.
    store_seconds : float
        Seconds to write keys and values into the pool of a rank and, for a gather of sharded pools,
        into its scratch; of the rank that writes most.
    slowest_attention_seconds, slowest_gather_seconds : float
        Seconds of the slowest rank of each batch, summed.
    single_rank_seconds : float
        Seconds of attention and store of the same layer on a single rank.
    placement, exchange, overlap : str
        Arguments of `predict`. With ``"auto"``, exchange is the choice, or several choices
        separated by ``/`` if batches differ.
    ranks_per_host : int
        The argument.
    cpus : int or None
        The argument.
    scratch_bytes : int
        Bytes that a rank needs beside its pool for one layer of the largest batch: received rows,
        blocks of a ring, queries and states of others.
    hidden_seconds : float
        Seconds of the exchange that overlap hides.
    mesh : (int, int) or None
        The argument.
    alternatives : dict
        Seconds of a layer with each exchange for all batches; empty without ``"auto"``.
    reason : str
        Difference between ``"auto"`` and the best other exchange; empty without ``"auto"``.

    Examples
    --------
    >>> from cpattn_lab.cost_model import AttentionLayer, Rates, predict
    >>> rates = Rates(gflops=900, gather_gb_per_s=10)
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
    bias_bytes: NDArray[np.int64]
    imbalance: float
    store_seconds: float
    slowest_attention_seconds: float
    slowest_gather_seconds: float
    single_rank_seconds: float
    placement: str = "replicated"
    exchange: str = "gather"
    overlap: str = "none"
    ranks_per_host: int = 1
    cpus: int | None = None
    scratch_bytes: int = 0
    hidden_seconds: float = 0.0
    mesh: Mesh | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @property
    def num_hosts(self) -> int:
        """Number of hosts; ranks share memory only within a host."""
        return self.cp_size // self.ranks_per_host

    @property
    def layer_seconds(self) -> float:
        """Seconds of attention, exchange and store of one layer, on the slowest ranks."""
        parts = self.slowest_attention_seconds + self.slowest_gather_seconds + self.store_seconds
        return parts - self.hidden_seconds

    @property
    def model_seconds(self) -> float:
        """Seconds of attention, exchange and store of all layers."""
        return self.layer_seconds * self.layer.num_layers

    @property
    def speedup(self) -> float:
        """Seconds of a single rank over those of all ranks."""
        return self.single_rank_seconds / self.layer_seconds

    @property
    def efficiency(self) -> float:
        """Speed-up over the number of ranks."""
        return self.speedup / self.cp_size

    @property
    def attention_share(self) -> float:
        """Attention's fraction of the time of a layer, from 0 to 1."""
        return self.slowest_attention_seconds / self.layer_seconds


def predict(
    batches: Sequence[Batch],
    layer: AttentionLayer,
    rates: Rates,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    placement: str = "replicated",
    exchange: str = "gather",
    overlap: bool | str = "none",
    ranks_per_host: int = 1,
    cpus: int | None = None,
    state_dtype: str = "float32",
    mesh: tuple[int, int] | None = None,
) -> Prediction:
    """Predict the time of attention and of its exchange over `cp_size` ranks.

    Parameters
    ----------
    batches : sequence of (extend_lens, seq_lens)
        New tokens of each sequence of a batch, and its length including them and cached tokens.
    layer : AttentionLayer
        Sizes and number of the layers.
    rates : Rates
        Speed of a rank.
    cp_size : int
        Number of ranks.
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias, as for `build_cp_metadata`.
    placement : {"replicated", "page_interleave", "token_interleave", "token_interleave:I"}
        Whether the pool of each rank has all tokens, or every `cp_size`-th page or token.
    exchange : {"gather", "ring", "pass_q", "all_to_all", "usp", "auto"}
        Communication, as in `exchange_work`. ``"auto"`` is the choice of `ContextParallel` for each
        batch, by its rule: the fewest bytes, with merging converted to bytes and without rates;
        replicated pools are gathered. `Prediction.alternatives` has the seconds of other exchanges.
    overlap : {"none", "full", "ahead"} or bool
        Whether ranks exchange one part while they attend to another. A layer then takes the longer
        of both, plus the parts that cannot overlap: the first part of one, the last of the other.
        ``"ahead"`` adds `ContextParallel.prefetch`: for a gather of sharded pools, the cached rows
        of a layer come while the previous layer is computed. True is ``"full"``.
    ranks_per_host : int
        Ranks that share the memory and wire of a host, whose rate is `Rates.gather_gb_per_s`.
        Communication within a host, barriers included, counts as free.
    cpus : int, optional
        CPUs of a host. If its ranks have more threads, computation slows down in proportion; if
        they have as many, it waits while a CPU sends and receives. Default: enough.
    state_dtype : {"float32", "bfloat16", "float16"}
        Dtype of the outputs that ``"pass_q"`` sends back to be merged.
    mesh : (int, int), optional
        Rows on the ring and ranks of a row, for ``"usp"``; ``"auto"`` then considers it, too.

    Returns
    -------
    Prediction
        Seconds of each rank and of the whole, bytes, and balance.

    Raises
    ------
    TypeError
        If lengths or the number of ranks are no integers, or `strategy` is no str.
    ValueError
        If there are no batches or a batch has no new tokens, lengths do not match, the number of
        ranks is outside [1, 32768], a name is unknown, ``"pass_q"`` meets replicated pools, or
        `ranks_per_host` does not divide `cp_size`.

    Examples
    --------
    >>> from cpattn_lab.cost_model import AttentionLayer, Rates, predict
    >>> rates = Rates(gflops=900, gather_gb_per_s=10)
    >>> forecast = predict([([32768], [32768])], AttentionLayer(), rates, cp_size=8)
    >>> forecast.imbalance, int(forecast.sent_bytes.max())
    (1.0, 117440512)

    With few new tokens after a long prefix in sharded pools, the queries travel.

    >>> batch = [([256], [131072])]
    >>> sharded = {"cp_size": 8, "placement": "page_interleave", "exchange": "auto"}
    >>> forecast = predict(batch, AttentionLayer(), rates, **sharded)
    >>> forecast.exchange, forecast.pool_bytes * 8 == 131072 * 4096 * 32
    ('pass_q', True)
    """
    check_kind("predict", "layer", layer, AttentionLayer)
    check_kind("predict", "rates", rates, Rates)
    batches = items(batches, "predict", "batches")
    if not batches:
        raise ValueError("predict: batches must hold at least one batch")
    known = (*EXCHANGES, "auto")
    check_placing("predict", placement, exchange, cp_size, ranks_per_host, state_dtype, known)
    mesh = check_mesh("predict", placement, exchange, cp_size, ranks_per_host, mesh)
    if cpus is not None:
        check_integer("predict", "cpus", cpus)
    overlap = _overlap_name(overlap)
    names = possible_exchanges(placement, mesh) if exchange == "auto" else (exchange,)
    chosen: list[str] = []
    slower_alone = crowding(rates, 1, cpus)
    totals = {name: _Total(layer) for name in dict.fromkeys((*names, exchange))}
    alone = 0.0
    for i, batch in enumerate(batches):
        if len(lens := items(batch, "predict", f"batches[{i}]")) != 2:
            raise ValueError(
                f"predict: batches[{i}] must be (extend_lens, seq_lens), got {len(lens)} values"
            )
        extends, lengths = lens
        counts = BatchCounts(
            extends,
            lengths,
            cp_size=cp_size,
            strategy=strategy,
            layer=layer,
            placement=placement,
            ranks_per_host=ranks_per_host,
            function="predict",
        )
        ways = {}
        for name in names:
            work = work_of(counts, name, state_dtype, mesh)
            if overlap == "ahead":
                work = replace(work, scratch_bytes=work.scratch_bytes + work.ahead_bytes)
            ways[name] = work, layer_seconds(work, layer, rates, overlap=overlap, cpus=cpus)
        if exchange == "auto":
            chosen.append(exchange_taken(counts, mesh))
            ways["auto"] = ways[chosen[-1]]
        for name, way in ways.items():
            totals[name].add(*way)
        attend = slower_alone * float(rates.attention_seconds(counts.alone, layer).max())
        store = slower_alone * rates.store_seconds(counts.own, layer)
        alone += attend + store
    if not totals[names[0]].sums["new_tokens"]:
        raise ValueError("predict: batches must have new tokens, got none")
    found = {
        name: Prediction(
            strategy=strategy,
            cp_size=cp_size,
            layer=layer,
            num_batches=len(batches),
            single_rank_seconds=alone,
            placement=placement,
            exchange=name,
            overlap=overlap,
            ranks_per_host=ranks_per_host,
            cpus=cpus,
            mesh=mesh,
            **total.fields(),
        )
        for name, total in totals.items()
    }
    if exchange != "auto":
        return found[exchange]
    taken = "/".join(name for name in names if name in chosen)
    return _compared(replace(found.pop("auto"), exchange=taken), list(found.values()))


def _overlap_name(overlap: bool | str) -> str:
    if isinstance(overlap, bool | np.bool_):
        return OVERLAPS[overlap]
    if overlap not in OVERLAPS:
        raise ValueError(f"predict: overlap must be a bool, none, full or ahead, got {overlap!r}")
    return overlap


class _Total:
    """Work and seconds summed over batches; for memory the largest."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer
        self.sums: dict[str, Any] = {}
        self._most: dict[str, int] = {"pool_bytes": 0, "scratch_bytes": 0}

    def add(self, work: ExchangeWork, seconds: LayerSeconds) -> None:
        loads = work.pairs * (work.heads / work.heads.max())
        parts = {
            "new_tokens": int(work.tokens.sum()),
            "pairs": work.pairs,
            "most_pairs": float(loads.max()),
            "mean_pairs": float(loads.mean()),
            "attention_seconds": seconds.attention,
            "gather_seconds": seconds.exchange,
            "sent_bytes": work.sent_bytes,
            "received_bytes": work.received_bytes,
            "bias_bytes": work.pairs * work.heads * self._layer.bias_bytes,
            "store_seconds": seconds.store,
            "slowest_attention_seconds": float(seconds.attention.max()),
            "slowest_gather_seconds": float(seconds.exchange.max()),
            "hidden_seconds": seconds.hidden,
        }
        self.sums = {name: self.sums.get(name, 0) + part for name, part in parts.items()}
        self._most = {name: max(most, getattr(work, name)) for name, most in self._most.items()}

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Prediction`."""
        sums = dict(self.sums)
        imbalance = sums.pop("most_pairs") / sums.pop("mean_pairs")
        return sums | self._most | {"imbalance": imbalance}


def _compared(auto: Prediction, others: Sequence[Prediction]) -> Prediction:
    """Add the seconds of the other exchanges, and the difference from the best of them."""
    alternatives = {each.exchange: each.layer_seconds for each in others}
    named = [each for each in others if each.exchange != auto.exchange]
    best = min(named, key=lambda each: each.layer_seconds)
    saved = best.layer_seconds - auto.layer_seconds
    reason = f"{auto.exchange} takes no longer than {best.exchange}"
    if saved:
        less, more = (auto, best) if saved > 0 else (best, auto)
        costs, other_costs = _costs(less), _costs(more)
        most = max(costs, key=lambda name: other_costs[name] - costs[name])
        part = 100 * abs(saved) / more.layer_seconds
        reason = f"{less.exchange} takes {part:.2g}% less than {more.exchange}: less {most}"
        if saved < 0:
            reason = f"{auto.exchange} by the fewest bytes, though {reason}"
    return replace(auto, alternatives=alternatives, reason=reason)


def _costs(prediction: Prediction) -> dict[str, float]:
    """Return the seconds of a layer by cause."""
    attention = prediction.slowest_attention_seconds
    if prediction.overlap != "none":
        return {"attention": attention, "unhidden exchange": prediction.layer_seconds - attention}
    return {
        "attention": attention,
        "exchange": prediction.slowest_gather_seconds,
        "store": prediction.store_seconds,
    }
