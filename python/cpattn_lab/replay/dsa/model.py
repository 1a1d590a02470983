# SPDX-License-Identifier: Apache-2.0
"""Sparse attention of DeepSeek-V3.2 (DSA): an indexer chooses the keys of each query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..model import DecoderConfig, Rotation, rotate

EPS = 1e-6  # epsilon of all norms


@dataclass(frozen=True)
class DsaConfig(DecoderConfig):
    """One decoder layer with latent attention (MLA) over the `topk` keys of the indexer.

    More layers would only repeat it, and their check could not be exact: rounding decides between
    two keys with nearly equal scores, and the next layer depends on this choice.
    """

    kind = "dsa"
    phases = ("metadata", "gather", "indexer", "top-k", "attention", "projections")
    attention_phases = ("indexer", "top-k", "attention")

    num_layers: int = 1
    num_heads: int = 16
    q_lora_rank: int = 512
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    index_heads: int = 16
    index_head_dim: int = 128
    topk: int = 512
    kv_dtype: str = "bf16"
    prefill_impl: str = "flashmla_kv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers != 1:
            raise ValueError(f"DsaConfig: num_layers must be 1, got {self.num_layers}")
        if self.kv_dtype not in ("bf16", "fp8"):
            raise ValueError(f"DsaConfig: kv_dtype must be bf16 or fp8, got {self.kv_dtype!r}")
        sizes = self.kv_lora_rank, self.qk_rope_head_dim, self.index_head_dim, self.dtype
        if self.kv_dtype == "fp8" and sizes != (512, 64, 128, "bfloat16"):
            raise ValueError(
                "DsaConfig: kv_lora_rank, qk_rope_head_dim, index_head_dim and dtype must be 512, "
                f"64, 128 and bfloat16 for fp8 rows, got {', '.join(map(str, sizes))}"
            )

    @property
    def title(self) -> str:
        return f"sparse attention to {self.topk} keys, {self.dtype}, {self.kv_dtype} cache"

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a token's row in the KV pool: the latent, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Scale of the scores: the scale of the unabsorbed heads, times the gain."""
        return self.query_gain * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5

    def make_attention(self) -> nn.Module:
        return SparseLatentAttention(self)


class SparseInputs(NamedTuple):
    """Inputs of attention in a layer: queries of `rows`, keys of all new tokens."""

    q: Tensor  # [rows, num_heads, latent_dim], absorbed
    latent: Tensor  # [tokens, 1, latent_dim]: K; its first kv_lora_rank columns are V
    index_q: Tensor  # [rows, index_heads, index_head_dim]
    index_k: Tensor  # [tokens, index_head_dim]
    index_weights: Tensor  # float32 [rows, index_heads], with all factors of the score


class SparseOperators(Protocol):
    """Operators of a layer: a rank has them from the library, the check from plain torch."""

    def split_norm(
        self, x: Tensor, q_weight: Tensor, kv_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split x [tokens, q_lora_rank + kv_lora_rank + rope]; normalise the first two parts.

        The parts are [tokens, q_lora_rank], [tokens, 1, kv_lora_rank] and [tokens, 1, rope].
        """

    def attend(self, layer: int, inputs: SparseInputs) -> Tensor:
        """Return latent outputs [rows, num_heads, kv_lora_rank]."""


class SparseLatentAttention(nn.Module):
    """Projections of DeepSeek-V3.2 around the indexer and absorbed latent attention."""

    def __init__(self, config: DsaConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.qkv_a_proj = linear(c.hidden_size, c.q_lora_rank + c.latent_dim)
        self.q_a_norm = nn.RMSNorm(c.q_lora_rank, eps=EPS)
        self.kv_a_norm = nn.RMSNorm(c.kv_lora_rank, eps=EPS)
        self.q_b_proj = linear(c.q_lora_rank, c.num_heads * head_dim)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(c.num_heads * c.v_head_dim, c.hidden_size)
        self.index_q_proj = linear(c.q_lora_rank, c.index_heads * c.index_head_dim)
        self.index_k_proj = linear(c.hidden_size, c.index_head_dim)
        self.index_k_norm = nn.LayerNorm(c.index_head_dim, eps=EPS)
        self.index_weights_proj = linear(c.hidden_size, c.index_heads)

    def forward(
        self,
        layer: int,
        normed: Tensor,
        rotation: Rotation,
        operators: SparseOperators,
        rows: Tensor | None,
    ) -> Tensor:
        c = self.config
        q_lora, latent, k_pe = operators.split_norm(
            self.qkv_a_proj(normed), self.q_a_norm.weight, self.kv_a_norm.weight
        )
        k_pe = rotate(k_pe, rotation, interleaved=True)
        index_k = self._rotate_leading(
            self.index_k_norm(self.index_k_proj(normed))[:, None], rotation
        )
        if rows is not None:
            normed, q_lora = normed[rows], q_lora[rows]
            rotation = rotation[0][rows], rotation[1][rows]
        w_key, w_value = self._up_projections()
        inputs = SparseInputs(
            q=self._queries(q_lora, rotation, w_key),
            latent=torch.cat([latent, k_pe], -1),
            index_q=self._rotate_leading(
                self.index_q_proj(q_lora).unflatten(-1, (c.index_heads, -1)), rotation
            ),
            index_k=index_k[:, 0],
            index_weights=self.index_weights_proj(normed).float()
            * (c.index_heads * c.index_head_dim) ** -0.5,
        )
        out = operators.attend(layer, inputs)
        values = torch.einsum("thc,hvc->thv", out, w_value)
        projected: Tensor = self.o_proj(values.flatten(1))
        return projected

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return projections of the latent: [heads, nope, kv_lora] to keys, [heads, v, kv_lora] to
        values."""
        c = self.config
        weight = self.kv_b_proj.weight.unflatten(0, (c.num_heads, -1))
        w_key, w_value = weight.split([c.qk_nope_head_dim, c.v_head_dim], 1)
        return w_key, w_value

    def _queries(self, q_lora: Tensor, rotation: Rotation, w_key: Tensor) -> Tensor:
        """Return queries of all heads with the up-projection of the keys absorbed."""
        c = self.config
        q = self.q_b_proj(q_lora).unflatten(-1, (c.num_heads, -1))
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        absorbed = torch.einsum("thn,hnc->thc", q_nope, w_key)
        return torch.cat([absorbed, rotate(q_pe, rotation, interleaved=True)], -1)

    def _rotate_leading(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first rope_dim elements of indexer heads [tokens, heads, index_head_dim]."""
        rope, rest = x.split([self.config.rope_dim, x.shape[-1] - self.config.rope_dim], -1)
        return torch.cat([rotate(rope, rotation), rest], -1)
