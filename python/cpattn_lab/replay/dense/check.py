# SPDX-License-Identifier: Apache-2.0
"""Check of results: recomputes each whole prompt in one process, in float32, with torch."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpattn._limits import check_integer
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch

from ...traffic.trace import block_tokens_of
from ..model import Decoder, DecoderConfig
from ..side_by_side import side_by_side
from .baseline import sdpa
from .model import DenseConfig

Array = npt.NDArray[Any]
# Results of a prompt's chunks: batch, positions, hidden states, and keys of a sparse model.
Pending = list[tuple[int, Array, Array, Array]]
# Prompt with all its chunks: its number, the request, and the results of its chunks.
Prompt = tuple[int, Request, Pending]
_TOKENS_AT_ONCE = 32768  # limit for prompts computed at once, whose memory is in GiB


class Checker:
    """Compares sampled rows of every chunk, once the last chunk of its prompt has arrived.

    ``errors[batch]`` is the largest absolute error of the final hidden states (which have unit root
    mean square) over the compared rows of a batch; inf if one is not finite. ``tell(what, share)``
    is called now and then with the finished share of a comparison.

    Prompts of a batch are computed in parallel, each by itself.
    """

    def __init__(self, config: Any, *, block_tokens: int, rows_per_chunk: int) -> None:
        check_integer("Checker", "rows_per_chunk", rows_per_chunk)
        self.tolerance = self.tolerance_of(config)
        self.errors: dict[int, float] = defaultdict(float)
        self.num_rows = 0
        self.seconds = 0.0
        self._config = config
        self._block_tokens = block_tokens
        self._rows_per_chunk = rows_per_chunk
        self.tell: Callable[[str, float], None] = lambda what, share: None
        self._model = Decoder(config).float()  # the weights as the replay rounded them
        for layer in self._model.layers.values():
            layer.register_forward_hook(self._layer_done)
        self._share = self._layer_share = 0.0  # part of a comparison done, and a layer's
        self._pending: dict[int, Pending] = defaultdict(list)  # chunks by request
        self._lock = threading.Lock()  # guards counts while prompts are computed
        self._stopped = False

    @staticmethod
    def tolerance_of(config: Any) -> float:
        """Return the bound on ``errors`` that rounding explains.

        The roundings of v and the output are norm, v, weights, output and o_proj; those of q and
        of k norm, projection, norm and rotation.
        """
        rho2, sum2 = rounding_variances(config)
        hidden, head = config.hidden_size, config.head_dim
        stored = stored_variance(config)
        value = 5 * rho2 + stored + (2 * hidden + config.num_heads * head) * sum2
        score = 4 * rho2 + stored / 2 + (2 * hidden + head) * sum2  # mean of q and the stored k
        return error_bound(config, value, score)

    def sample_rows(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return rows to compare: the first and last of each chunk, and some between."""
        return sample_rows(batch, seed=self._config.seed, rows_per_chunk=self._rows_per_chunk)

    def compare(
        self,
        batch: Batch,
        rows: npt.NDArray[np.int64],
        hidden: Array,
        chosen: Array | None = None,
    ) -> None:
        """Add the hidden states [len(rows), hidden_size] of `rows`; check finished prompts.

        chosen : int32, shape [len(rows), topk], optional
            Positions of the keys that each row attended to, -1 in the tail.
        """
        starts = np.cumsum([0, *batch.extend_lens])
        cuts = np.searchsorted(rows, starts)
        keys = np.empty((len(rows), 0), np.int32) if chosen is None else chosen
        complete = sum(chunk.is_last for chunk in batch.chunks)
        self._share, self._layer_share = 0.0, 1 / max(complete * len(self._model.layers), 1)
        self.tell("check", 0.0)
        prompts: list[Prompt] = []
        for i, chunk in enumerate(batch.chunks):
            mine = slice(cuts[i], cuts[i + 1])
            pending = self._pending[chunk.request_index]
            positions = chunk.begin + rows[mine] - starts[i]
            pending.append((batch.index, positions, hidden[mine], keys[mine]))
            if chunk.is_last:
                index = chunk.request_index
                prompts.append((index, chunk.request, self._pending.pop(index)))
        self._finish(prompts)

    def _finish(self, prompts: list[Prompt]) -> None:
        """Check prompts with all their sampled rows."""
        begin = time.perf_counter()
        lengths = [request.input_length for _, request, _ in prompts]
        expected = side_by_side(
            self._expected, prompts, lengths, at_once=_TOKENS_AT_ONCE, stop=self._stop
        )
        for (_, _, pending), rows in zip(prompts, expected, strict=True):
            self._compare_rows(pending, rows)
        self.seconds += time.perf_counter() - begin

    def _expected(self, prompt: Prompt) -> Array:
        """Compute the correct sampled rows of a prompt."""
        _, request, pending = prompt
        _, positions, _, chosen = zip(*pending, strict=True)
        return self._reference(
            self._tokens_of(request), np.concatenate(positions), np.concatenate(chosen)
        )

    def _stop(self) -> None:
        self._stopped = True

    def _compare_rows(self, pending: Pending, expected: Array) -> None:
        """Compare the sampled rows of a prompt with the correct ones."""
        batches, _, hidden, _ = zip(*pending, strict=True)
        errors = np.abs(np.concatenate(hidden) - expected).max(axis=1)
        errors[~np.isfinite(errors)] = np.inf
        for index, error in zip(np.repeat(batches, [len(h) for h in hidden]), errors, strict=True):
            self.errors[int(index)] = max(self.errors[int(index)], float(error))
        self.num_rows += len(errors)

    def _reference(self, tokens: Array, positions: Array, chosen: Array) -> Array:
        """Return the correct hidden states of rows of a sequence."""
        rows = torch.from_numpy(positions)
        return self._forward(tokens, lambda _, q, k, v: dense_attention(q, k, v, rows), rows)

    def _layer_done(self, *_: object) -> None:
        if self._stopped:
            raise RuntimeError("the check was stopped")
        with self._lock:
            self._share = min(self._share + self._layer_share, 1.0)
            self.tell("check", self._share)

    def _tokens_of(self, request: Request) -> npt.NDArray[np.int64]:
        return block_tokens_of(
            request,
            0,
            request.input_length,
            block_tokens=self._block_tokens,
            vocab_size=self._config.vocab_size,
            seed=self._config.seed,
        )

    def _forward(self, tokens: npt.NDArray[np.int64], attention: Any, rows: Tensor) -> Array:
        """Run a whole sequence through the decoder; return hidden states of `rows`."""
        with torch.inference_mode():
            positions = torch.arange(len(tokens))
            hidden = self._model(torch.from_numpy(tokens), positions, attention, rows=rows)
        out: Array = hidden.numpy()
        return out


def sample_rows(batch: Batch, *, seed: int, rows_per_chunk: int) -> npt.NDArray[np.int64]:
    """Return rows to compare: the first and last of each chunk, and some between."""
    rng = np.random.default_rng((seed, batch.index))
    rows, start = [], 0
    for length in batch.extend_lens:
        between = np.arange(1, length - 1)
        if length > rows_per_chunk:
            between = rng.choice(between, max(rows_per_chunk - 2, 0), replace=False)
        rows.append(start + np.union1d(between, [0, length - 1]))
        start += length
    return np.concatenate(rows).astype(np.int64)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Compute causal attention over whole sequences; q has all rows of k, or those at `rows`."""
    return sdpa(q, k, v, None if len(q) == len(k) else torch.arange(len(k)) <= rows[:, None])


def stored_variance(config: DenseConfig) -> float:
    """Return the relative error variance of keys and values in an 8-bit pool; else 0.

    Rounding to float8 is like rounding to any dtype. A step of int8 is the largest number of a
    token and head, assumed to be four times the root mean square, divided by 127.
    """
    if config.kv_dtype == "int8":
        return (4 / 127) ** 2 / 12
    return rounding_variance(getattr(torch, config.pool_dtype)) if config.has_codes else 0.0


def rounding_variance(dtype: torch.dtype) -> float:
    """Return the relative variance of rounding to a dtype, with rms error eps / (2 sqrt 3)."""
    return torch.finfo(dtype).eps ** 2 / 12


def rounding_variances(config: DecoderConfig) -> tuple[float, float]:
    """Return the relative variances of rounding to a dtype, and of a float32 sum per term.

    A product that sums K terms in float32, in at least 16 partial sums, adds K / 32 roundings of
    float32 (the sums are random walks).
    """
    return rounding_variance(config.torch_dtype), rounding_variance(torch.float32) / 32


def error_bound(config: DecoderConfig, value: float, score: float) -> float:
    """Return the bound on the error of a final hidden state due to rounding in attention.

    e2 is the relative error variance of the residual stream through one layer. s = 1 / (2 layers)
    is the share of a sublayer's output; g = query_gain is the deviation of the scores, with which
    relative errors of q and of k enter the logarithm of the weights:

        attention  e2 <- e2 (1 + s (1 + 2 g^2)) + s (value + 2 g^2 score) + rho^2
        MLP        e2 <- e2 (1 + 2 s)           + s gated                 + rho^2

    where value, score and gated are the variances from rounding v and the output, q and k, and the
    MLP (norm, gate, up, silu, product, down). The bound is six deviations: a Gaussian stays below
    it over 10^8 values, and measured errors of dense attention are a fifth of it.
    """
    rho2, sum2 = rounding_variances(config)
    gated = 6 * rho2 + (3 * config.hidden_size + config.intermediate_size) * sum2
    share, gain2 = 1 / (2 * config.num_layers), config.query_gain**2
    e2 = 0.0
    for _ in range(config.num_layers):
        e2 += e2 * share * (1 + 2 * gain2) + share * (value + 2 * gain2 * score) + rho2
        e2 += e2 * share * 2 + share * gated + rho2
    return 6 * math.sqrt(e2 + rho2)
