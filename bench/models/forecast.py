# SPDX-License-Identifier: Apache-2.0
"""Predictions of the cost model for a whole pass of an engine.

The model covers attention, the exchange and the store of keys. The rest of a layer is measured in
the same processes, in passes whose attention does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from bench.harness.contender import Failed
from bench.models.peers import CORES, ENGINES, Peer, Ranks
from bench.models.steps import Case
from bench.serving.model import QUICK, QWEN3
from cpattn_lab.cost_model import AttentionLayer, Rates, predict, predict_decode
from cpattn_lab.cost_model.calibration import attention_rates, calibrate

TOKEN_BUDGET = 2048  # of a batch, the default of the engine


def layer_of(dtype: str, *, quick: bool) -> AttentionLayer:
    sizes = QUICK if quick else QWEN3
    return AttentionLayer(
        num_heads=16, num_kv_heads=8, head_dim=sizes["head_dim"],
        num_layers=sizes["num_hidden_layers"], page_size=16, dtype=dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class Forecasts:
    """Rates of a rank, alone with both threads and as one of two, and their layers."""

    layer: AttentionLayer
    rates: dict[int, Rates]  # by the number of ranks
    rests: dict[tuple[str, int], float] = field(default_factory=dict)

    @classmethod
    def measured(cls, layer: AttentionLayer) -> Forecasts:
        """Measure attention with both cores at work, and the exchange between two processes."""
        alone = calibrate(layer, threads=CORES)
        both: dict[str, Any] = attention_rates(layer, CORES)
        one = replace(alone, threads=1, **both | {"gflops": both["gflops"] / CORES})
        return cls(layer, {1: alone, CORES: one})

    def of(self, peers: Sequence[Peer], case: Case) -> dict[str, float]:
        """Predicted seconds of each engine's timed call."""
        found = {}
        for peer in peers:
            if peer.name in ENGINES:
                ranks = ENGINES[peer.name]
                with suppress(Failed):  # whose row says it
                    found[peer.name] = self._rest(peer, case) + self.attention(case, ranks)
        return found

    def _rest(self, peer: Peer, case: Case) -> float:
        """Seconds without attention; those of a pass over some rows are measured once."""
        if case.steps:
            return float(peer.ask("rest_of_step", batch=case.batch)["seconds"])
        number = passes(case, ENGINES[peer.name].size)
        for rows in number:
            if (peer.name, rows) not in self.rests:
                self.rests[peer.name, rows] = peer.ask("rest", rows=rows)["seconds"]
        return sum(self.rests[peer.name, rows] * times for rows, times in number.items())

    def attention(self, case: Case, ranks: Ranks) -> float:
        """Seconds of attention in all layers, with exchange and store."""
        size, placement, rates = ranks.size, ranks.placement, self.rates[ranks.size]
        if ranks.link_gbps:
            rates = replace(rates, gather_gb_per_s=ranks.link_gbps / 8)
        if case.steps:
            lengths = [case.cached + case.steps // 2] * case.batch
            step = predict_decode(
                lengths, self.layer, rates, cp_size=size, exchange="auto", out_heads="all",
                ranks_per_host=1 if ranks.link_gbps else size,
            )  # fmt: skip
            if placement == "replicated":  # each rank has all of it
                return step.single_rank_seconds * self.layer.num_layers
            return step.model_seconds
        batches = [([new], [behind + new]) for behind, new in chunks(case)]
        forecast = predict(
            batches, self.layer, rates, cp_size=size, placement=placement, overlap="full",
            exchange="gather" if placement == "replicated" else "auto", cpus=CORES // size,
        )  # fmt: skip
        return forecast.model_seconds


def chunks(case: Case) -> list[tuple[int, int]]:
    """Tokens before each batch of a prompt, and in it."""
    begins = range(0, case.new, TOKEN_BUDGET)
    return [(case.cached + begin, min(TOKEN_BUDGET, case.new - begin)) for begin in begins]


def passes(case: Case, size: int) -> Counter[int]:
    """Number of passes of a prompt, by the rows that a rank has in them."""
    return Counter(-(-new // size) for _, new in chunks(case))
