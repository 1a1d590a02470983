# SPDX-License-Identifier: Apache-2.0
"""Attention over the keys of one rank, and the merge of what several ranks computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..attention import default_scale, merge_state, paged_attention
from .exchange import digest
from .heads import LayerSizes
from .sequence_calls import SequenceCall


@dataclass(frozen=True)
class AttentionOptions:
    """Of `ContextParallel.attend`, without those of its outputs."""

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: str | None = None
    batch_invariant: bool = True

    def scalars(self) -> dict[str, Any]:
        """Those of `paged_attention` that do not concern which keys are seen."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "kv_dtype": self.kv_dtype,
            "batch_invariant": self.batch_invariant,
        }


@dataclass(frozen=True)
class ShardInputs:
    """Queries of a rank and the keys and values that it holds, checked, for one layer."""

    q: torch.Tensor  # [rows, num_heads, head_dim]
    k: torch.Tensor  # [slots, num_kv_heads, head_dim]
    v: torch.Tensor  # [slots, num_kv_heads, v_head_dim], which may be a part of the keys
    k_rope: torch.Tensor | None  # the last dimensions of the keys, where they are apart
    shares_values: bool  # values are a part of the keys
    options: AttentionOptions

    def take(self, rows: torch.Tensor, heads: slice = slice(None)) -> list[torch.Tensor]:
        """Copies of keys, and of values unless they are a part of these: [rows, heads, dim]."""
        keys = _rows(self.k[:, heads], rows)
        if self.k_rope is not None:
            keys = torch.cat([keys, _rows(self.k_rope[:, heads], rows)], dim=-1)
        return [keys] if self.shares_values else [keys, _rows(self.v[:, heads], rows)]

    def values_of(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        """The values of what `take` gives."""
        return taken[0][..., : self.v.shape[-1]] if self.shares_values else taken[1]

    @property
    def kv_dims(self) -> list[int]:
        """The last dimension of each tensor that `take` gives."""
        keys = self.k.shape[-1] + (0 if self.k_rope is None else self.k_rope.shape[-1])
        return [keys] if self.shares_values else [keys, self.v.shape[-1]]

    def sizes(self) -> LayerSizes:
        """What decides how much travels."""
        return LayerSizes(
            num_heads=self.q.shape[1],
            num_kv_heads=self.k.shape[1],
            head_dim=self.q.shape[2],
            v_head_dim=self.v.shape[2],
            q_bytes=self.q.element_size(),
            kv_bytes=self.k.element_size(),
            shares_values=self.shares_values,
        )

    def digest(self) -> int:
        """Of what all ranks must be given alike: scales of codes are those of a rank's own pool."""
        o = self.options
        shapes = [(x.dtype, *x.shape[1:]) for x in (self.q, self.k, self.v)]
        values = (o.scale, o.causal, o.window, o.softcap, o.kv_dtype, shapes, self.kv_dims)
        sinks = b"" if o.sinks is None else np.ascontiguousarray(o.sinks.numpy())
        return digest(repr(values).encode(), sinks)


def _rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of some rows, also of codes, which torch can only move as bytes."""
    if x.element_size() > 1:
        return x.index_select(0, rows)
    return x.view(torch.uint8).index_select(0, rows).view(x.dtype)


def put_rows(x: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Write some rows of x, also of codes."""
    if x.element_size() == 1:
        x, values = x.view(torch.uint8), values.view(torch.uint8)
    x.index_copy_(0, rows, values)


def head_scale(scale: Any, heads: slice) -> Any:
    """Of some KV heads, of a scale that may be that of all."""
    return scale[heads] if getattr(scale, "ndim", 0) == 1 and len(scale) > 1 else scale


def checked_inputs(
    call: str,
    options: AttentionOptions,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    v_head_dim: int | None,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> ShardInputs:
    """Everything that a layer attends with; attention of no row has the core check most of it."""
    _check_axes(call, "q", q)
    k = _slots(call, "k_shard", k_cache)
    if (q_rope is None) != (k_rope is None):
        raise ValueError(f"ContextParallel.{call}: q_rope and k_rope must be given together")
    rope = None if k_rope is None else _slots(call, "k_rope", k_rope)
    if q_rope is not None:
        _check_axes(call, "q_rope", q_rope)
        q = torch.cat([q, q_rope], dim=-1)
    if v_cache is not None:
        v = _slots(call, "v_shard", v_cache)
    elif v_head_dim is None or not 0 < v_head_dim <= k.shape[-1]:
        raise ValueError(
            f"ContextParallel.{call}: v_head_dim must be given without v_shard, from 1 to the "
            f"{k.shape[-1]} elements of a key, got {v_head_dim}"
        )
    else:
        v = k[..., :v_head_dim]
    scale = options.scale
    options = replace(
        options,
        scale=default_scale(f"ContextParallel.{call}", q.shape[-1]) if scale is None else scale,
        k_scale=_slot_scale(options.k_scale),
        v_scale=_slot_scale(options.v_scale),
    )
    keys, values = (k, v) if rope is None else (torch.cat([k[:1], rope[:1]], dim=-1), v[:1])
    paged_attention(
        q[:0], keys, values, q_lens=[0], kv_lens=[0], block_tables=np.zeros((1, 0), np.int32),
        page_size=1, causal=options.causal, window=options.window, sinks=options.sinks,
        **options.scalars(),
    )  # fmt: skip
    sinks = None if options.sinks is None else torch.as_tensor(options.sinks)
    return ShardInputs(q, k, v, rope, v_cache is None, replace(options, sinks=sinks))


def _slot_scale(scale: Any) -> Any:
    """A scale of each token and head in slots, as the keys are; others as they are."""
    return scale.flatten(0, 1) if getattr(scale, "ndim", 0) == 3 else scale


def _check_axes(call: str, name: str, q: torch.Tensor) -> None:
    if q.ndim != 3:
        raise ValueError(
            f"ContextParallel.{call}: {name} must be [num_rows, num_heads, dim], got shape "
            f"{list(q.shape)}"
        )


def _slots(call: str, name: str, cache: torch.Tensor) -> torch.Tensor:
    if cache.ndim not in (3, 4) or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.{call}: {name} must be contiguous, [num_slots, num_kv_heads, dim] or "
            f"in pages of these, got shape {list(cache.shape)}, strides {list(cache.stride())}"
        )
    return cache.view(-1, *cache.shape[-2:])


def attend_part(
    calls: Sequence[SequenceCall],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over the keys of one rank, without sinks: zeros and LSE -inf where there are none."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = torch.full(q.shape[:2], -torch.inf)
    for call in calls:
        whole = len(k) // call.page_size * call.page_size
        pools = [pool[:whole] for pool in (k, v)]
        scalars = options.scalars()
        for name in ("k_scale", "v_scale"):
            if getattr(scalars[name], "ndim", 0) == 2:
                scalars[name] = scalars[name][:whole]
        part, part_lse = paged_attention(
            q.index_select(0, call.rows),
            *pools,
            q_lens=call.q_lens,
            kv_indptr=call.kv_indptr,
            kv_indices=call.kv_indices,
            last_page_len=call.last_page_len,
            page_size=call.page_size,
            causal=call.causal,
            packed_custom_mask=call.packed_custom_mask,
            return_lse=True,
            **scalars,
        )
        out.index_copy_(0, call.rows, part)
        lse.index_copy_(0, call.rows, part_lse)
    return out, lse


def merged_columns(
    outs: torch.Tensor, lses: torch.Tensor, num_parts: int, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `merged`, of parts that lie behind each other as flat rows."""
    num_heads = lses.shape[1]
    rows = (num_parts, len(lses) // num_parts)
    out_parts = outs.unflatten(1, (num_heads, outs.shape[1] // num_heads)).unflatten(0, rows)
    lse_parts = lses.unflatten(0, rows)
    return merged(list(zip(out_parts, lse_parts, strict=True)), sinks)


def merged(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One result of the parts, merged in their order in float32 and rounded once.

    A sink takes weight here, so once; it has no part in the LSE.
    """
    out, lse = parts[0][0].float(), parts[0][1].clone()
    for other, other_lse in parts[1:]:
        merge_state(out, lse, other.float(), other_lse)
    if sinks is not None:
        out *= torch.sigmoid(lse - sinks)[..., None]
    return out.to(parts[0][0].dtype), lse
