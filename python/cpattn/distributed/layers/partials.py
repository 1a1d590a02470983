# SPDX-License-Identifier: Apache-2.0
"""Attention over the keys of one rank, and the merge of partial results of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _core
from ..._arguments import key_window
from ..._containers import need_scales
from ..._types import ScoreBias, Window
from ...attention import default_scale
from ...merge import merge_states
from ..plans.sequence_call import Positions, SequenceCall
from ..plans.tokens import NewTokens
from ..transport.terms import digest, term
from .rows import put_rows
from .shard_keys import ShardKeys, slots_of


class State(NamedTuple):
    """Partial result of rows over some of their keys."""

    out: torch.Tensor  # [rows, num_heads, dim]
    lse: torch.Tensor  # [rows, num_heads]


@dataclass(frozen=True)
class AttentionOptions:
    """Options of `ContextParallel.attend`, without outputs."""

    scale: float | None = None
    causal: bool = True
    window: Any = None  # as given, or `Sides` after `checked_inputs`
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: str | None = None
    batch_invariant: bool = True
    bias: ScoreBias = None
    alibi_slopes: torch.Tensor | None = None
    relative_bias: torch.Tensor | None = None

    @property
    def left(self) -> int | None:
        """Number of keys before a token's own in the window of checked options; None for all."""
        return self.window and self.window[0]

    @property
    def has_token_scales(self) -> bool:
        """Whether codes have a scale for each token, stored beside the pool."""
        return any(getattr(scale, "ndim", 0) == 2 for scale in (self.k_scale, self.v_scale))

    def of_heads(self, heads: slice, q_heads: slice) -> AttentionOptions:
        """Return the options for some KV heads and the query heads that read them."""
        slopes, table, sinks = self.alibi_slopes, self.relative_bias, self.sinks
        return replace(
            self,
            k_scale=head_scale(self.k_scale, heads),
            v_scale=head_scale(self.v_scale, heads),
            sinks=None if sinks is None else sinks[q_heads].contiguous(),
            bias=_bias_of_heads(self.bias, q_heads),
            alibi_slopes=None if slopes is None else slopes[..., q_heads],
            relative_bias=None if table is None else table[q_heads],
        )

    def biases(
        self, call: SequenceCall, made_positions: Callable[[], Positions]
    ) -> tuple[Any, ...] | None:
        """Return the biases for a call over the keys of one rank."""
        given = self.bias, self.alibi_slopes, self.relative_bias
        if all(x is None for x in given):
            return None
        positions = made_positions()
        tokens = positions.tokens[call.rows.numpy()]
        first_key = positions.begins[call.requests] + call.first_key
        return *given, (tokens, positions.keys, first_key, call.requests, positions.first)

    def keywords(self) -> dict[str, Any]:
        """Return the options by the argument names of all attention functions."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name != "batch_invariant"
        }

    def scales_digest(self) -> int:
        """Digest the scales of codes, which must be equal on ranks that read each other's keys."""
        return term((_numbers(self.k_scale), _numbers(self.v_scale)))

    def of_slots(self, num_slots: int) -> AttentionOptions:
        """Return the options with only the scales of the first slots, if each token has its own."""
        scales = {
            name: scale[:num_slots]
            for name in ("k_scale", "v_scale")
            if getattr(scale := getattr(self, name), "ndim", 0) == 2
        }
        return replace(self, **scales)


@dataclass(frozen=True)
class ShardInputs(ShardKeys):
    """Checked queries of a rank, and the keys and values that it holds, for one layer."""

    q: torch.Tensor  # [rows, num_heads, head_dim]
    options: AttentionOptions

    def sizes(self) -> _core.LayerBytes:
        """Return the sizes that decide the communicated bytes."""
        (num_heads, head_dim), v_dim = self.q.shape[1:], self.v.shape[2]
        item = self.q.element_size()
        return _core.LayerBytes(
            num_heads, self.k.shape[1], head_dim * item, self.head_bytes, v_dim * item, v_dim
        )

    def q_heads(self, heads: slice) -> slice:
        """Return the query heads that read some KV heads."""
        group = self.q.shape[1] // self.k.shape[1]
        return slice(heads.start * group, heads.stop * group)

    def flops(self, num_pairs: int) -> int:
        """Return the multiplications and additions of all heads for so many query-key pairs."""
        return 2 * num_pairs * self.q.shape[1] * (self.q.shape[2] + self.v.shape[2])

    def digest(self) -> int:
        """Digest the arguments that ranks must share, without scales (see `scales_digest`)."""
        o = self.options
        shapes = [(x.dtype, *x.shape[1:]) for x in (self.q, self.k, self.v)]
        values = (o.scale, o.causal, o.window, o.softcap, o.kv_dtype, shapes, self.kv_dims)
        of_heads = [
            np.empty(0, np.float32) if x is None else np.ascontiguousarray(x.numpy())
            for x in (o.sinks, o.alibi_slopes, o.relative_bias)
        ]
        shapes_of_heads = [x.shape for x in of_heads]
        bias = [(x.dtype, x.shape) for x in _tensors_of(o.bias)]
        return digest(repr((values, shapes_of_heads, bias)).encode(), *of_heads)


def _numbers(scale: Any) -> tuple[float, ...] | None:
    if scale is None:
        return None
    return tuple(torch.as_tensor(scale, dtype=torch.float32, device="cpu").flatten().tolist())


def _tensors_of(bias: Any) -> Sequence[Any]:
    """Return the tensors of a bias: one per sequence, or one for all."""
    return bias if isinstance(bias, list | tuple) else [] if bias is None else [bias]


def _bias_of_heads(bias: Any, heads: slice) -> Any:
    """Return a bias for some query heads; an axis of length 1 counts for each."""
    parts = [x if x.shape[-3] == 1 else x[..., heads, :, :] for x in _tensors_of(bias)]
    return parts if isinstance(bias, list | tuple) else parts[0] if parts else None


def head_scale(scale: Any, heads: slice) -> Any:
    """Return the scales of some KV heads.

    Scales come per head, per slot and head, or as one for all heads.
    """
    axes = getattr(scale, "ndim", 0)
    if axes == 2:
        return scale[:, heads]
    return scale[heads] if axes == 1 and len(scale) > 1 else scale


def checked_inputs(
    call: str,
    tokens: NewTokens,
    options: AttentionOptions,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    v_head_dim: int | None,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
) -> ShardInputs:
    """Check all inputs of a layer; the core checks most, by attention of no rows."""
    check_axes(call, "q", q)
    k = slots_of(call, "k_shard", k_cache)
    if (q_rope is None) != (k_rope is None):
        raise ValueError(f"ContextParallel.{call}: q_rope and k_rope must be given together")
    rope = None if k_rope is None else slots_of(call, "k_rope", k_rope)
    if q_rope is not None and rope is not None:
        expected = (*q.shape[:2], rope.shape[-1])
        if q_rope.shape != expected or q_rope.dtype != q.dtype:
            raise ValueError(
                f"ContextParallel.{call}: q_rope must be {list(expected)} of {q.dtype}, as queries "
                f"and k_rope are, got {list(q_rope.shape)} of {q_rope.dtype}"
            )
        q = torch.cat([q, q_rope], dim=-1)
    if v_cache is not None:
        v = slots_of(call, "v_shard", v_cache)
    elif v_head_dim is None or not 0 < v_head_dim <= k.shape[-1]:
        raise ValueError(
            f"ContextParallel.{call}: v_head_dim must be given without v_shard, from 1 to the "
            f"{k.shape[-1]} elements of a key, got {v_head_dim}"
        )
    else:
        v = k[..., :v_head_dim]
    scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    need_scales(f"ContextParallel.{call}", k, options.kv_dtype, **scales)
    scale = options.scale
    options = replace(
        options,
        scale=default_scale(f"ContextParallel.{call}", q.shape[-1]) if scale is None else scale,
        k_scale=_slot_scale(options.k_scale),
        v_scale=_slot_scale(options.v_scale),
    )
    biases = options.bias, options.alibi_slopes, options.relative_bias
    _core.check_bias(biases, q.shape[1], *tokens.padded_lens)
    zeros = np.zeros(1, np.int64)
    nothing = SequenceCall(
        rows=torch.from_numpy(zeros[:0]), q_lens=zeros,
        kv_indptr=np.zeros(2, np.int64), kv_indices=zeros[:0], last_page_len=zeros,
        requests=zeros, first_key=zeros, page_size=1,
    )  # fmt: skip
    paged_rows(
        nothing, q[:0], k, v, rope, options, causal=options.causal, window=options.window,
        sinks=options.sinks,
    )  # fmt: skip
    tensors: dict[str, Any] = {
        name: torch.as_tensor(x, device="cpu")
        for name in ("sinks", "alibi_slopes", "relative_bias")
        if (x := getattr(options, name)) is not None
    }
    sides = key_window(options.window, options.causal, f"ContextParallel.{call}", "window")
    options = replace(options, window=sides, **tensors)
    return ShardInputs(k, v, rope, v_cache is None, q, options)


def _slot_scale(scale: Any) -> Any:
    """Return scales of tokens and heads in slot order, like the keys; other scales unchanged."""
    return scale.flatten(0, 1) if getattr(scale, "ndim", 0) == 3 else scale


def check_axes(call: str, name: str, q: torch.Tensor, last: str = "dim") -> None:
    """Refuse queries that have not three axes."""
    if q.ndim != 3:
        raise ValueError(
            f"ContextParallel.{call}: {name} must be [num_rows, num_heads, {last}], got shape "
            f"{list(q.shape)}"
        )


def no_state(num_rows: int, q: torch.Tensor, v: torch.Tensor) -> State:
    """Return the state of rows without keys: zeros, and LSE -inf."""
    out = q.new_zeros(num_rows, q.shape[1], v.shape[-1])
    return State(out, q.new_full(out.shape[:2], -torch.inf, dtype=torch.float32))


def attend_part(
    call: SequenceCall | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    positions: Callable[[], Positions],
    k_rope: torch.Tensor | None = None,
    state: State | None = None,
) -> State:
    """Attend over the keys of one rank, without sinks, into a given `no_state` or a new one.

    The last dimensions of keys may be separate, in `k_rope`; queries are always whole.
    """
    state = no_state(len(q), q, v) if state is None else state
    if call is None:
        return state
    whole = len(k) // call.page_size * call.page_size
    part, lse = paged_rows(
        call, q.index_select(0, call.rows), k[:whole], v[:whole],
        None if k_rope is None else k_rope[:whole], options.of_slots(whole),
        biases=options.biases(call, positions),
    )  # fmt: skip
    put_rows([state.out, state.lse], call.rows, [part, lse])
    return state


def paged_rows(
    call: SequenceCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor | None,
    options: AttentionOptions,
    *,
    causal: bool = False,
    window: Window = None,
    sinks: torch.Tensor | None = None,
    biases: tuple[Any, ...] | None = None,
) -> State:
    """Run `paged_attention` on the rows of one call, with keys in one pool or in two."""
    split = q.shape[-1] - (0 if k_rope is None else k_rope.shape[-1])
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    o = options
    scale = default_scale("paged_attention", q.shape[-1]) if o.scale is None else o.scale
    _core.paged_attention(
        q[..., :split], k, v, call.q_lens, None, None, None, call.kv_indptr, call.kv_indices,
        call.last_page_len, call.page_size, "NHD", o.k_scale, o.v_scale, o.kv_dtype, scale,
        causal, window, o.softcap, biases, sinks, None, call.packed_custom_mask, False,
        o.batch_invariant, False, None, out, lse, None if k_rope is None else q[..., split:],
        k_rope, call.key_ranges,
    )  # fmt: skip
    return State(out, lse)


def merged_columns(
    outs: torch.Tensor, lses: torch.Tensor, num_parts: int, sinks: torch.Tensor | None
) -> State:
    """Merge parts, as `merged` does, that follow each other as flat rows."""
    num_heads = lses.shape[1]
    rows = (num_parts, len(lses) // num_parts)
    out_parts = outs.unflatten(1, (num_heads, outs.shape[1] // num_heads)).unflatten(0, rows)
    lse_parts = lses.unflatten(0, rows)
    return State(*merge_states(out_parts.transpose(0, 1), lse_parts.transpose(0, 1), sinks=sinks))


def merged(parts: Sequence[State], sinks: torch.Tensor | None) -> State:
    """Merge the parts in order, in float32 and rounded once, with a sink for each head.

    The result is a new tensor, as parts may lie in a receive buffer that the next call overwrites.
    """
    outs, lses = zip(*parts, strict=True)
    return State(*merge_states(outs, lses, sinks=sinks))
