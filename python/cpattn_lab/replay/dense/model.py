# SPDX-License-Identifier: Apache-2.0
"""Decoder with dense attention over grouped heads (GQA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ..model import Attention, DecoderConfig, Rotation, rotate


@dataclass(frozen=True)
class DenseConfig(DecoderConfig):
    """Decoder with dense attention over grouped heads."""

    kind = "dense"
    phases = ("metadata", "gather", "attention", "rest")
    attention_phases = ("attention",)

    # Dtypes of pools with codes; "bf16" is a pool of the model's dtype instead.
    CODES: ClassVar[dict[str, str]] = {
        "fp8": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
        "int8": "int8",
    }

    num_kv_heads: int = 2
    head_dim: int = 64
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"DenseConfig: num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim > 576:
            raise ValueError(f"DenseConfig: head_dim must be at most 576, got {self.head_dim}")
        if self.head_dim % 2:
            raise ValueError(
                "DenseConfig: head_dim must be even, as positions turn pairs of numbers, got "
                f"{self.head_dim}"
            )
        if self.kv_dtype not in ("bf16", *self.CODES):
            raise ValueError(
                f"DenseConfig: kv_dtype must be bf16, {', '.join(self.CODES)}, got "
                f"{self.kv_dtype!r}"
            )

    @property
    def title(self) -> str:
        cache = f", {self.kv_dtype} cache" if self.has_codes else ""
        return f"dense attention in {self.dtype}{cache}"

    @property
    def has_codes(self) -> bool:
        """Whether keys and values are stored in 8 bits."""
        return self.kv_dtype in self.CODES

    @property
    def pool_dtype(self) -> str:
        return self.CODES.get(self.kv_dtype, self.dtype)

    @property
    def scale_dtype(self) -> str | None:
        """Dtype of scales of each token and head; normalised keys and values need none in FP8."""
        return "float16" if self.kv_dtype == "int8" else None

    @property
    def rope_dim(self) -> int:
        return self.head_dim

    def make_attention(self) -> nn.Module:
        return GroupedAttention(self)


class GroupedAttention(nn.Module):
    """Projections to normalised, rotated queries and keys of grouped heads (GQA), and back."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.config = config
        hidden, head = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head, bias=False)
        self.kv_proj = nn.Linear(hidden, 2 * config.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, hidden, bias=False)

    def forward(
        self,
        layer: int,
        normed: Tensor,
        rotation: Rotation,
        attention: Attention,
        rows: Tensor | None,
    ) -> Tensor:
        config = self.config
        # A rank may have no rows, so every size is explicit: -1 is undefined for empty tensors.
        kv_shape = len(normed), 2, config.num_kv_heads, config.head_dim
        k, v = self.kv_proj(normed).view(kv_shape).unbind(1)
        k = rotate(F.rms_norm(k, k.shape[-1:]), rotation)
        if rows is not None:
            normed, rotation = normed[rows], (rotation[0][rows], rotation[1][rows])
        q = self.q_proj(normed).view(len(normed), config.num_heads, config.head_dim)
        q = rotate(F.rms_norm(q, q.shape[-1:]) * config.query_gain, rotation)
        out: Tensor = self.o_proj(attention(layer, q, k, v).flatten(1))
        return out
