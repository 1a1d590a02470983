# SPDX-License-Identifier: Apache-2.0
"""Small decoder with random weights, shaped like the models of serving engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpattn._limits import check_integer

from ..limits import check_number

# A layer's attention module calls this with its number and the projected tensors. Dense:
# attention(layer, q, k, v) -> out: q and out [rows, Hq, D], new k and v [tokens, Hk, D].
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class DecoderConfig(ABC):
    """Sizes of any decoder; `query_gain` is the standard deviation of its attention scores.

    Random queries and keys of unit gain would attend to all keys nearly alike and average the
    values to nothing, which would hide K/V of a wrong page. From 2 on, few keys dominate.
    """

    kind: ClassVar[str]
    phases: ClassVar[tuple[str, ...]]  # phases of a pass; the last one is the rest of its time
    attention_phases: ClassVar[tuple[str, ...]]  # phases that the torch baseline also has

    num_layers: int = 4
    hidden_size: int = 512
    num_heads: int = 8
    intermediate_size: int = 1536
    vocab_size: int = 4096
    rope_theta: float = 1e6
    query_gain: float = 2.0
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        function = type(self).__name__
        for field in fields(self):
            value = getattr(self, field.name)
            if type(field.default) is int:
                check_integer(function, field.name, value, 0 if field.name == "seed" else 1)
            elif type(field.default) is float:
                check_number(function, field.name, value)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    @abstractmethod
    def title(self) -> str:
        """Description in a few words, for reports."""

    @property
    @abstractmethod
    def rope_dim(self) -> int:
        """Number of rotated elements of a head."""

    @abstractmethod
    def make_attention(self) -> nn.Module:
        """Make a layer's attention: module(normed, rotation, attention, rows) -> [rows, hidden]."""


class Decoder(nn.Module):
    """Embedding, `num_layers` blocks, final norm; or one pipeline stage of them.

    The stage of `layers` (default: all) embeds if it has the first layer, and normalises if it has
    the last one. Equal configurations have equal weights, for any division into stages.

    Weights have unit gain; as in GPT-2, the two products that end in the residual stream are
    divided by sqrt(2 * num_layers), so that depth does not increase its size.
    """

    def __init__(self, config: DecoderConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers
        if self.is_first:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config, i) for i in layers})
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self._fill()
        self.to(config.torch_dtype).requires_grad_(False)

    def _fill(self) -> None:
        shrink = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 1:  # norms stay at one
                continue
            std = 1.0 if name.startswith("embedding") else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= shrink
            nn.init.normal_(weight, std=std, generator=_generator_of(self.config, name))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        attention: Any,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [tokens, hidden_size] of new tokens; the last stage normalises them.

        x : int64, shape [tokens], or [tokens, hidden_size]
            Token ids for the first stage; the result of the previous stage for the others.
        positions : int64, shape [tokens]
            Positions within each sequence; the tokens may be any subset in any order.
        attention
            Function that the layers' attention modules call; it gets the new keys and values, and
            finds the older ones itself.
        rows : int64, shape [n], optional
            Rows of the last layer to compute; the layer then returns n rows, and calls `attention`
            with n rows.
        """
        rotation = make_rotation(positions, self.config)
        *layers, last = self.layers.values()
        if self.is_first:
            x = self.embedding(x)
        for layer in layers:
            x = layer(x, rotation, attention, None)
        x = last(x, rotation, attention, rows)
        out: Tensor = self.norm(x) if self.is_last else x
        return out


class Head(nn.Module):
    """Logits of hidden states, in float32. Equal configurations have equal weights.

    It is not the transposed embedding, with which a random decoder would repeat its last token.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        weight = torch.empty(config.vocab_size, config.hidden_size)
        std, generator = config.hidden_size**-0.5, _generator_of(config, "head")
        nn.init.normal_(weight, std=std, generator=generator)
        self.register_buffer("weight", weight.to(config.torch_dtype).float())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, vocab_size] of [rows, hidden_size], with unit variance."""
        return F.linear(hidden.float(), self.get_buffer("weight"))


def _generator_of(config: DecoderConfig, name: str) -> torch.Generator:
    """Return a separate random stream for each weight, so that a stage draws only its own."""
    return torch.Generator().manual_seed(crc32(f"{config.seed} {name}".encode()))


def stage_layers(num_layers: int, pp_size: int) -> list[range]:
    """Return the layers of each pipeline stage; the first stages have one more if necessary."""
    share, more = divmod(num_layers, pp_size)
    bounds = [stage * share + min(stage, more) for stage in range(pp_size + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


class DecoderLayer(nn.Module):
    """Attention, then a gated MLP."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index = index
        hidden = config.hidden_size
        self.input_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.attention = config.make_attention()
        self.post_norm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, attention: Any, rows: Tensor | None) -> Tensor:
        attended = self.attention(self.index, self.input_norm(x), rotation, attention, rows)
        x = (x if rows is None else x[rows]) + attended
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out


# cos and sin [tokens, 1, rope_dim / 2] of the rotary angles, float32.
Rotation = tuple[Tensor, Tensor]


def make_rotation(positions: Tensor, config: DecoderConfig) -> Rotation:
    """Return the rotation of tokens at `positions`.

    Angles are products in float64: float32 would lose them at positions beyond 10^5.
    """
    half = config.rope_dim // 2
    exponent = torch.arange(half, dtype=torch.float64) / half
    angle = positions.double()[:, None, None] * config.rope_theta**-exponent
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Apply the rotary embedding to [tokens, heads, rope_dim].

    Pairs are the halves (NeoX style), or neighbours if `interleaved`.
    """
    cos, sin = rotation
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.float().chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    return (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
