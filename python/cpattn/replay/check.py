# SPDX-License-Identifier: Apache-2.0
"""Is it right? Each prompt again: one process, whole, float32, no cache, attention by torch."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from .model import Decoder, ModelConfig
from .scheduler import Batch
from .trace import block_tokens_of

Array = npt.NDArray[Any]


class Checker:
    """Compares sampled rows of every chunk, once the last chunk of its prompt is there.

    ``errors[batch]`` is the largest absolute error of the final hidden states (which have unit
    root mean square) over the rows of a batch that were compared; inf if one is not finite.
    """

    def __init__(self, config: ModelConfig, *, block_tokens: int, rows_per_chunk: int) -> None:
        if rows_per_chunk < 1:
            raise ValueError(f"Checker: rows_per_chunk must be >= 1, got {rows_per_chunk}")
        self.tolerance = tolerance(config)
        self.errors: dict[int, float] = defaultdict(float)
        self.num_rows = 0
        self._config = config
        self._block_tokens = block_tokens
        self._rows_per_chunk = rows_per_chunk
        self._model = Decoder(config).float()  # the weights as the replay rounded them
        # By request: what its chunks gave so far, as (batch, positions, hidden states).
        self._pending: dict[int, list[tuple[int, Array, Array]]] = defaultdict(list)

    def sample_rows(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Rows of the batch to compare: of each chunk the first, the last and some between."""
        rng = np.random.default_rng((self._config.seed, batch.index))
        rows, start = [], 0
        for length in batch.extend_lens:
            between = np.arange(1, length - 1)
            if length > self._rows_per_chunk:
                between = rng.choice(between, max(self._rows_per_chunk - 2, 0), replace=False)
            rows.append(start + np.union1d(between, [0, length - 1]))
            start += length
        return np.concatenate(rows).astype(np.int64)

    def compare(self, batch: Batch, rows: npt.NDArray[np.int64], hidden: Array) -> None:
        """Take the hidden states [len(rows), hidden_size] of `rows`; check prompts that end."""
        starts = np.cumsum([0, *batch.extend_lens])
        cuts = np.searchsorted(rows, starts)
        for i, chunk in enumerate(batch.chunks):
            mine = slice(cuts[i], cuts[i + 1])
            pending = self._pending[chunk.request_index]
            pending.append((batch.index, chunk.begin + rows[mine] - starts[i], hidden[mine]))
            if chunk.is_last:
                positions = np.concatenate([positions for _, positions, _ in pending])
                expected = iter(self._reference(chunk.request, positions))
                for index, _, values in self._pending.pop(chunk.request_index):
                    for row in values:
                        error = float(np.abs(row - next(expected)).max())
                        self.errors[index] = max(self.errors[index], _finite(error))
                        self.num_rows += 1

    def _reference(self, request: Any, positions: Array) -> Array:
        tokens = block_tokens_of(
            request,
            0,
            request.input_length,
            block_tokens=self._block_tokens,
            vocab_size=self._config.vocab_size,
            seed=self._config.seed,
        )
        rows = torch.from_numpy(positions)
        with torch.inference_mode():
            hidden = self._model(
                torch.from_numpy(tokens),
                torch.arange(len(tokens)),
                lambda _, q, k, v: dense_attention(q, k, v, rows),
                rows=rows,
            )
        out: Array = hidden.numpy()
        return out


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def dense_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Causal attention over whole sequences; q are all rows of k, or those at `rows`."""
    mask = None
    if len(q) != len(k):
        mask = torch.arange(len(k)) <= rows[:, None]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def tolerance(config: ModelConfig) -> float:
    """Bound on the error of a final hidden state, which has unit root mean square.

    A rounding to dtype has a relative error of rms rho = eps / (2 sqrt 3); a product that sums K
    terms in float32, in at least 16 partial sums, adds K / 32 roundings of float32 (the sums are
    random walks). Relative variance e2 of the residual stream through one layer (s = 1 / (2
    layers), the share of what a sublayer adds; g = query_gain, the deviation of the scores, by
    which relative errors of q and of k enter the logarithm of the weights):

        attention  e2 <- e2 (1 + s (1 + 2 g^2)) + s (a + 2 g^2 b) + rho^2
        MLP        e2 <- e2 (1 + 2 s)           + s c             + rho^2

    where a, b, c are the variances that the roundings of v and the output (norm, v, weights,
    output, o_proj), of q and k (norm, projection, norm, rotation) and of the MLP (norm, gate, up,
    silu, product, down) bring in. The bound is six deviations: a Gaussian stays below it over 10^8
    values, and measured errors are a fifth of it.
    """
    eps, eps32 = torch.finfo(config.torch_dtype).eps, torch.finfo(torch.float32).eps
    rho2, sum2 = eps**2 / 12, eps32**2 / 12 / 32
    hidden, head, mlp = config.hidden_size, config.head_dim, config.intermediate_size
    value = 5 * rho2 + (2 * hidden + config.num_heads * head) * sum2
    score = 4 * rho2 + (2 * hidden + head) * sum2
    gated = 6 * rho2 + (3 * hidden + mlp) * sum2
    share, gain2 = 1 / (2 * config.num_layers), config.query_gain**2
    e2 = 0.0
    for _ in range(config.num_layers):
        e2 += e2 * share * (1 + 2 * gain2) + share * (value + 2 * gain2 * score) + rho2
        e2 += e2 * share * 2 + share * gated + rho2
    return 6 * math.sqrt(e2 + rho2)
