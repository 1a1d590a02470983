# SPDX-License-Identifier: Apache-2.0
"""Check of a sparse model: recomputes which keys to choose, and attention to the chosen ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from cpattn import reference

from ..dense.check import Checker, error_bound, rounding_variance, rounding_variances
from .model import EPS, DsaConfig, SparseInputs

Array = npt.NDArray[Any]
_FP8_VARIANCE = rounding_variance(torch.float8_e4m3fn)  # variance of codes in rows and the indexer


class SparseChecker(Checker):
    """Checks the keys of sampled rows against scores in float64, then attention to these keys.

    Rounding decides between two keys whose scores differ by less than it: such a key is counted in
    ``num_swapped``. Any other wrong key makes the error of its row infinite.
    """

    def __init__(self, config: Any, *, block_tokens: int, rows_per_chunk: int) -> None:
        super().__init__(config, block_tokens=block_tokens, rows_per_chunk=rows_per_chunk)
        self.num_keys = 0
        self.num_swapped = 0

    @staticmethod
    def tolerance_of(config: DsaConfig) -> float:
        """Return the tolerance of hidden states, from the roundings on their way.

        Values pass norm, projection, norm, stored row, weights, output, up-projection and o_proj;
        queries pass norm, projection, norm, projection, and absorption or rotation; keys pass norm,
        projection, norm or rotation, and stored row. The tolerance is a little larger: keys count
        as many roundings as queries, besides the stored row, and both values and scores count the
        float32 sums over hidden_size, q_lora_rank and kv_lora_rank.
        """
        rho2, sum2 = rounding_variances(config)
        stored = _stored_variance(config)
        sums = config.hidden_size + config.q_lora_rank + config.kv_lora_rank
        value = 7 * rho2 + stored + (sums + config.num_heads * config.v_head_dim) * sum2
        score = 5 * rho2 + stored / 2 + sums * sum2
        return error_bound(config, value, score)

    def _reference(self, tokens: Array, positions: Array, chosen: Array) -> Array:
        operators = RestrictedAttention(self._config, positions, chosen)
        hidden = self._forward(tokens, operators, torch.from_numpy(positions))
        hidden[operators.wrong_rows] = np.inf
        with self._lock:
            self.num_keys += operators.num_keys
            self.num_swapped += operators.num_swapped
        return hidden


class RestrictedAttention:
    """Attends from rows at `positions` of one whole prompt to keys that were chosen elsewhere."""

    def __init__(self, config: DsaConfig, positions: Array, chosen: Array) -> None:
        self._config = config
        self._positions = positions
        self._chosen = np.sort(chosen, axis=1)  # sorted by position, -1 first
        self.wrong_rows = np.zeros(len(positions), bool)
        self.num_keys = 0
        self.num_swapped = 0

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self._config
        q, latent, rope = x.split([c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim], -1)
        q = F.rms_norm(q, q.shape[-1:], q_weight, eps=EPS)
        latent = F.rms_norm(latent, latent.shape[-1:], kv_weight, eps=EPS)
        return q, latent[:, None], rope[:, None]

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        margins = self._margins(inputs)
        keys = inputs.index_k.double()
        for i, position in enumerate(self._positions):
            products = keys[: position + 1] @ inputs.index_q[i].double().T
            scores = products.relu_() @ inputs.index_weights[i].double()
            self._check_keys(i, scores.numpy(), float(margins[i]))
        return self._restricted(inputs)

    def _margins(self, inputs: SparseInputs) -> Tensor:
        """Return the bound on what rounding adds to the difference of two scores, by row.

        A score is a sum over heads of w relu(q.k); a relative error of variance e2 in w, q or k
        changes a term by at most |w| |q| |k| sqrt(e2 / dim). The bound is six deviations.
        """
        rho2, _ = rounding_variances(self._config)
        quantised = 2 * (rho2 + _FP8_VARIANCE) if self._config.kv_dtype == "fp8" else 0.0
        e2 = 11 * rho2 + quantised  # 5 roundings of q, 4 of k, 2 of w
        terms = inputs.index_weights * inputs.index_q.norm(dim=-1)
        largest = inputs.index_k.norm(dim=-1).max()
        dim = self._config.index_head_dim
        return 6 * math.sqrt(2 * e2 / dim) * largest * terms.norm(dim=-1)

    def _check_keys(self, row: int, scores: Array, margin: float) -> None:
        """Record whether a row's keys have the largest scores, up to the margin."""
        keys = self._chosen[row][self._chosen[row] >= 0]
        self.num_keys += len(keys)
        count = min(self._config.topk, len(scores))
        distinct = len(keys) == count and bool(np.all(np.diff(keys) > 0))
        if not distinct or keys[-1] >= len(scores):
            self.wrong_rows[row] = True
            return
        threshold = np.partition(scores, -count)[-count]
        others = np.delete(scores, keys)
        self.num_swapped += int(np.sum(scores[keys] < threshold))
        self.wrong_rows[row] = scores[keys].min() < threshold - margin or (
            len(others) > 0 and others.max() > threshold + margin
        )

    def _restricted(self, inputs: SparseInputs) -> Tensor:
        """Compute dense attention, in float64, of each row to a sequence of its keys alone."""
        c = self._config
        valid = self._chosen >= 0
        width = max(int(valid.sum(axis=1).max(initial=1)), 1)
        keys = np.flip(self._chosen, axis=1)[:, :width].clip(0, len(inputs.latent) - 1)
        cache = inputs.latent.numpy()
        out, _ = reference.paged_attention(
            inputs.q.numpy(),
            cache,
            cache[..., : c.kv_lora_rank],
            q_lens=[1] * len(keys),
            kv_lens=valid.sum(axis=1).clip(1),
            block_tables=keys,
            page_size=1,
            scale=c.scale,
        )
        return torch.from_numpy(out).float()


def _stored_variance(config: DsaConfig) -> float:
    """Return the relative variance of rounding a row in the pool."""
    return _FP8_VARIANCE if config.kv_dtype == "fp8" else rounding_variances(config)[0]
