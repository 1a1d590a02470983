# SPDX-License-Identifier: Apache-2.0
"""A small decoder with random weights, in the shape of the models that serving engines run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# attention(layer, q, k, v) -> out: q and out [rows, Hq, D], k and v [tokens, Hk, D], the new ones.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder; `query_gain` is the standard deviation of its attention scores.

    Random queries and keys of unit gain would attend to all keys nearly alike, and average the
    values to nothing: K/V of a wrong page would pass unnoticed. From 2 on few keys dominate.
    """

    num_layers: int = 4
    hidden_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1536
    vocab_size: int = 4096
    rope_theta: float = 1e6
    query_gain: float = 2.0
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelConfig: {name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim < 16 or self.head_dim % 16:
            raise ValueError(
                f"ModelConfig: head_dim must be a positive multiple of 16, got {self.head_dim}"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


class Decoder(nn.Module):
    """Embedding, `num_layers` blocks, final norm. Equal configurations have equal weights.

    Weights have unit gain; the two products that end in the residual stream are smaller by
    sqrt(2 * num_layers), as GPT-2's, so that depth does not blow it up.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self._fill(torch.Generator().manual_seed(config.seed))
        self.to(config.torch_dtype).requires_grad_(False)

    def _fill(self, generator: torch.Generator) -> None:
        shrink = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 1:  # norms stay at one
                continue
            std = 1.0 if name.startswith("embedding") else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= shrink
            nn.init.normal_(weight, std=std, generator=generator)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden_size], normalised, of new tokens at their positions.

        token_ids, positions : int64, shape [tokens]
            Positions count within each sequence; the tokens may be any subset in any order.
        attention
            Called once a layer; sees the new keys and values, and finds the older ones itself.
        rows : int64, shape [n], optional
            Compute only these rows of the last layer, which then returns, and calls `attention`
            with, n rows.
        """
        rotation = _rotation(positions, self.config)
        x = self.embedding(token_ids)
        for layer in self.layers[:-1]:
            x = layer(x, rotation, attention, None)
        out: Tensor = self.norm(self.layers[-1](x, rotation, attention, rows))
        return out


class DecoderLayer(nn.Module):
    """Attention with normalised queries and keys (GQA, RoPE), then a gated MLP."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.config = config
        hidden, head = config.hidden_size, config.head_dim
        self.input_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=False)
        self.kv_proj = nn.Linear(hidden, 2 * config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=False)
        self.post_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: Attention,
        rows: Tensor | None,
    ) -> Tensor:
        config = self.config
        normed = self.input_norm(x)
        k, v = self.kv_proj(normed).view(len(x), 2, config.num_kv_heads, -1).unbind(1)
        k = _rotate(F.rms_norm(k, k.shape[-1:]), rotation)
        if rows is not None:
            x, normed = x[rows], normed[rows]
            rotation = rotation[0][rows], rotation[1][rows]
        q = self.q_proj(normed).view(len(x), config.num_heads, -1)
        q = _rotate(F.rms_norm(q, q.shape[-1:]) * config.query_gain, rotation)
        x = x + self.o_proj(attention(self.index, q, k, v).flatten(1))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out


def _rotation(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, 1, head_dim / 2] of the rotary angles, float32.

    The angles are products in float64: float32 would lose them at positions beyond 10^5.
    """
    half = config.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) / half
    angle = positions.double()[:, None, None] * config.rope_theta**-exponent
    return angle.cos().float(), angle.sin().float()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim], the halves being the pairs (NeoX style)."""
    cos, sin = rotation
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
