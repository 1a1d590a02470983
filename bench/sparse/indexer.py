# SPDX-License-Identifier: Apache-2.0
"""The indexer: 512 queries at the end of a sequence, their scores for all keys before them.

torch multiplies 16 queries at a time in bfloat16, because more would not fit a CPU cache: whole
rows of scores, or 1024 keys at a time into a reused buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

import cpattn
from bench.harness import accuracy
from bench.harness.comparison import Bar, Comparison, Timed, Wrong, percent_of_peak, times_as_fast
from bench.sparse import THREADS

TOPK = 2048
KVS = (4096, 16384, 65536)
QUERIES, KEYS = 16, 1024  # of a product of torch
FEW, SCORES = "cpattn bf16, top 16", "cpattn bf16, scores only"
BLOCKS, ROWS, EINSUM = "torch 16 × 1024", "torch 16 queries", "torch einsum"


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and weights of one request, in bfloat16, with key ranges [0, ke)."""

    num_tokens: int
    kv_len: int
    num_heads: int
    head_dim: int = 128

    @cached_property
    def q(self) -> torch.Tensor:
        return self._normal(0, self.num_tokens, self.num_heads, self.head_dim).bfloat16()

    @cached_property
    def k(self) -> torch.Tensor:
        return self._normal(1, self.kv_len, self.head_dim).bfloat16()

    @cached_property
    def weights(self) -> torch.Tensor:
        """Weights of both signs, like a projection's; bfloat16 values, which torch never rounds."""
        shape = (self.num_tokens, self.num_heads)
        return (self._normal(2, *shape) * self.num_heads**-0.5).bfloat16().float()

    @cached_property
    def ke(self) -> torch.Tensor:
        first = self.kv_len - self.num_tokens + 1
        return torch.arange(first, self.kv_len + 1, dtype=torch.int32)

    @cached_property
    def ks(self) -> torch.Tensor:
        return torch.zeros_like(self.ke)

    @property
    def pairs(self) -> int:
        return int(self.ke.sum())

    def _normal(self, seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Quantized:
    """Queries and keys in one byte each; the queries' scales are part of the weights."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    k_scale: torch.Tensor


def quantize(inputs: Inputs, dtype: torch.dtype) -> Quantized:
    """One scale for each row of 128."""
    q, q_scale = quantize_rows(inputs.q.float(), dtype)
    k, k_scale = quantize_rows(inputs.k.float(), dtype)
    return Quantized(q, k, inputs.weights * q_scale, k_scale)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.abs().amax(-1).clamp_min(1e-4) / limit
    x = x / scale[..., None]
    return (x.round() if dtype == torch.int8 else x).clamp(-limit, limit).to(dtype), scale


def exact(inputs: Inputs | Quantized, row: int, length: int) -> np.ndarray:
    """The float64 scores of one query."""
    products = inputs.k[:length].double() @ inputs.q[row].double().T
    scores = products.relu_() @ inputs.weights[row].double()
    if isinstance(inputs, Quantized):
        scores *= inputs.k_scale[:length]
    return scores.numpy()


def score_blocks(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    """The scores of 16 queries from one on, 1024 keys at a time."""
    product = torch.empty(QUERIES * inputs.num_heads, KEYS, dtype=torch.bfloat16)
    weights = inputs.weights.bfloat16()
    scores = torch.empty(QUERIES, 1, inputs.kv_len, dtype=torch.bfloat16)

    def run(first: int) -> torch.Tensor:
        length = int(inputs.ke[first + QUERIES - 1])
        q, w = inputs.q[first : first + QUERIES].flatten(0, 1), weights[first : first + QUERIES]
        for begin in range(0, length, KEYS):
            keys = inputs.k[begin : min(begin + KEYS, length)]
            out = product[:, : len(keys)] if len(keys) == KEYS else None
            out = torch.mm(q, keys.T, out=out).relu_().unflatten(0, (QUERIES, -1))
            scores[:, :, begin : begin + len(keys)] = torch.bmm(w[:, None], out)
        return scores[:, 0, :length]

    return run


def score_rows(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    """The scores of 16 queries from one on, all keys in one product."""
    weights = inputs.weights.bfloat16()

    def run(first: int) -> torch.Tensor:
        length = int(inputs.ke[first + QUERIES - 1])
        q, w = inputs.q[first : first + QUERIES].flatten(0, 1), weights[first : first + QUERIES]
        product = (q @ inputs.k[:length].T).relu_().unflatten(0, (QUERIES, -1))
        return torch.bmm(w[:, None], product)[:, 0]

    return run


def score_einsum(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    """The formula of papers, also 16 queries at a time."""

    def run(first: int) -> torch.Tensor:
        length = int(inputs.ke[first + QUERIES - 1])
        rows = slice(first, first + QUERIES)
        products = torch.einsum("thd,kd->thk", inputs.q[rows], inputs.k[:length])
        return torch.einsum("thk,th->tk", products.relu().float(), inputs.weights[rows])

    return run


def torch_topk(inputs: Inputs, score: Callable[[int], torch.Tensor], topk: int) -> Any:
    def run() -> list[torch.Tensor]:
        return [chosen for first in range(0, inputs.num_tokens, QUERIES) for chosen in part(first)]

    def part(first: int) -> torch.Tensor:
        scores = visible(inputs, score(first), first)
        return torch.topk(scores, min(topk, scores.shape[1]), sorted=False).indices

    return run


def torch_logits(inputs: Inputs, score: Callable[[int], torch.Tensor]) -> Any:
    def run() -> torch.Tensor:
        logits = torch.full((inputs.num_tokens, inputs.kv_len), -torch.inf)
        for first in range(0, inputs.num_tokens, QUERIES):
            scores = visible(inputs, score(first), first)
            logits[first : first + QUERIES, : scores.shape[1]] = scores
        return logits

    return run


def visible(inputs: Inputs, scores: torch.Tensor, first: int) -> torch.Tensor:
    """Hides the keys after each query's own, which are among the last of the row."""
    tail = slice(max(0, scores.shape[1] - QUERIES), None)
    keys = torch.arange(scores.shape[1])[tail]
    scores[:, tail].masked_fill_(keys >= inputs.ke[first : first + QUERIES, None], -torch.inf)
    return scores


class Checker:
    """Compares results with exact scores of some rows."""

    def __init__(self, inputs: Inputs, quantized: dict[str, Quantized]) -> None:
        self.lengths = inputs.ke.tolist()
        self.rows = sorted({0, inputs.num_tokens // 2, inputs.num_tokens - 1})
        self.sources: dict[str, Inputs | Quantized] = {"bf16": inputs, **quantized}
        self._exact: dict[tuple[str, int], np.ndarray] = {}

    def exact(self, name: str, row: int) -> np.ndarray:
        dtype = next((key for key in self.sources if key in name), "bf16")
        if (dtype, row) not in self._exact:
            self._exact[dtype, row] = exact(self.sources[dtype], row, self.lengths[row])
        return self._exact[dtype, row]

    def logits(self, name: str, result: Any) -> float:
        worst = 0.0
        for row in self.rows:
            expected = self.exact(name, row)
            got = torch.as_tensor(result[row]).double().numpy()
            if not (got[self.lengths[row] :] == -np.inf).all():
                raise Wrong(f"row {row}: a hidden key has a score")
            worst = max(worst, _accepted(name, np.abs(got[: len(expected)] - expected), expected))
        return worst

    def topk(self, name: str, result: Any, topk: int) -> float:
        """The distance of the worst chosen score below the best one left out."""
        worst = 0.0
        for row in self.rows:
            expected, chosen = self.exact(name, row), np.asarray(result[row])
            chosen = chosen[chosen >= 0]
            taken = np.zeros(len(expected), bool)
            taken[chosen] = True
            if taken.sum() != min(topk, len(expected)) or len(chosen) != taken.sum():
                raise Wrong(f"row {row}: {len(chosen)} indices, {taken.sum()} of them distinct")
            if not taken.all():
                gap = expected[~taken].max() - expected[taken].min()
                worst = max(worst, _accepted(name, np.array([max(0.0, gap)]), expected))
        return worst


def _accepted(name: str, errors: np.ndarray, expected: np.ndarray) -> float:
    error = float(errors.max() / np.abs(expected).max())
    if not error <= accuracy.INDEXER[name.split()[0]]:
        raise Wrong(f"relative error {error:.2g}")
    return error


def comparisons(quick: bool) -> Iterator[Comparison]:
    shapes = [(64, 64, 256)] if quick else [(512, heads, kv) for heads in (64, 32) for kv in KVS]
    for num_tokens, num_heads, kv_len in shapes:
        inputs = Inputs(num_tokens, kv_len, num_heads)
        one_too = num_heads == 64 and not quick
        for num_threads in sorted({1, THREADS}) if one_too else [THREADS]:
            yield from of_inputs(inputs, num_threads, 32 if quick else TOPK)


def of_inputs(inputs: Inputs, num_threads: int, topk: int) -> Iterator[Comparison]:
    quantized = {
        "e4m3": quantize(inputs, torch.float8_e4m3fn),
        "int8": quantize(inputs, torch.int8),
    }
    checker = Checker(inputs, quantized)
    arguments = {"bf16": (inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke)}
    scales: dict[str, Any] = {"bf16": {}}
    for name, source in quantized.items():
        arguments[name] = (source.q, source.k, source.weights, inputs.ks, inputs.ke)
        scales[name] = {"k_scale": source.k_scale}

    def ours(function: str, dtype: str, **options: Any) -> Callable[[], Any]:
        return lambda: getattr(cpattn.sparse, function)(
            *arguments[dtype], **scales[dtype], **options
        )

    scorers = {BLOCKS: score_blocks(inputs), ROWS: score_rows(inputs)}
    if inputs.kv_len <= KVS[0]:
        scorers[EINSUM] = score_einsum(inputs)
    topks = {
        f"cpattn {dtype}": ours("indexer_topk", dtype, topk=topk, sorted=False)
        for dtype in arguments
    }
    topks[FEW] = ours("indexer_topk", "bf16", topk=min(16, topk), sorted=False)
    topks[SCORES] = ours("indexer_logits", "bf16")
    topks |= {name: torch_topk(inputs, score, topk) for name, score in scorers.items()}
    case: dict[str, Any] = {
        "heads": inputs.num_heads,
        "new": inputs.num_tokens,
        "KV": inputs.kv_len,
        "threads": num_threads,
    }
    flop = 2 * inputs.pairs * inputs.num_heads * inputs.head_dim
    work, items = (flop / 1e9, "GFLOP"), (inputs.pairs, "pair")

    def check(name: str, result: Any) -> float:
        if name == SCORES:
            return checker.logits(name, result)
        return checker.topk(name, result, min(16, topk) if name == FEW else topk)

    bars = topk_bars() if inputs.num_heads == 64 else ()
    title = f"indexer, top {topk}"
    yield Comparison("indexer", {"job": title, **case}, topks, check, work, items, bars)
    if inputs.kv_len == KVS[1] or inputs.kv_len < KVS[0]:  # one length is enough
        logits = {f"cpattn {dtype}": ours("indexer_logits", dtype) for dtype in arguments}
        logits |= {name: torch_logits(inputs, score) for name, score in scorers.items()}
        case = {"job": "indexer, scores", **case}
        yield Comparison("indexer", case, logits, checker.logits, work, items)


def topk_bars() -> tuple[Bar, ...]:
    amx = cpattn.active_isa().startswith("amx")
    ours = "cpattn bf16"
    return (
        percent_of_peak(ours, 50 if amx else 89),
        times_as_fast(ours, "torch's best", 3.5 if amx else 1.5, BLOCKS, ROWS),
        Bar(ours, "top-k's share of the time, %", 3, share_of_topk, at_least=False),
        times_as_fast("cpattn int8", "bf16", 1.6, ours),
    )


def share_of_topk(timed: Timed) -> float:
    """The time of top-k beyond the scores: written ones, or with a choice that costs little.

    The cheaper of the two counts, because writing large matrices costs time as well.
    """
    scores = min(timed[SCORES]["median"], timed[FEW]["median"])
    return max(0.0, 100 * (1 - scores / timed["cpattn bf16"]["median"]))
