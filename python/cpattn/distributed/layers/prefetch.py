# SPDX-License-Identifier: Apache-2.0
"""Cached keys of layers, each gathered while the previous layer is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..._arguments import items, key_window
from ..._types import Window
from ..plans.sharded_plan import ShardedPlan, check_rank
from ..transport.exchange import RowExchange
from ..transport.terms import NO_TERMS, digest, term
from .key_scratch import CACHED, KeyScratch, key_scratch
from .partials import ShardInputs
from .rows import check_tensor
from .shard_keys import ShardKeys, slots_of

_CALL = "ContextParallel.prefetch"
# Exchange that gathers cached keys; prefetched layers with "auto" take it, too.
_EXCHANGE = "gather"


class LayerCaches(NamedTuple):
    """Tensors of a layer for ``attend``, which ``ContextParallel.prefetch`` gathers ahead.

    Attributes
    ----------
    k_cache, v_cache, k_rope : tensors
        This rank's shards, as for ``attend``.
    window : int or pair, optional
        Window of ``attend``; keys before it are not gathered.

    Examples
    --------
    >>> import torch
    >>> from cpattn.distributed import LayerCaches
    >>> k_cache, v_cache = torch.zeros(2, 64, 8, 128)
    >>> LayerCaches(k_cache, v_cache, window=32).window
    32
    """

    k_cache: torch.Tensor
    v_cache: torch.Tensor | None = None
    k_rope: torch.Tensor | None = None
    window: Window = None


class _Layer(NamedTuple):
    keys: ShardKeys
    window: int | None
    scratch: KeyScratch

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and its value in all KV heads."""
        return self.keys.head_bytes * self.keys.k.shape[1]


class Prefetch:
    """Cached keys of a batch, gathered layer by layer.

    `ContextParallel.prefetch` makes it, and each ``attend`` takes one layer. It may be left
    unfinished without closing: rows on their way arrive, and the next prefetch waits for them.

    Parameters
    ----------
    exchange, plan, layers
        Checked arguments of `ContextParallel.prefetch`.

    Attributes
    ----------
    plan : ShardedPlan
        The plan of the batch.
    num_layers : int
        Number of layers.
    next_layer : int
        Layer of the next ``attend``, from 0 on; `num_layers` after the last.
    buffer_bytes : int
        Bytes of two layers' cached keys of all ranks, in addition to the scratch of ``attend``.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import PageInterleave
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4,
    ...                      placement=PageInterleave(shard_size=1, page_size=4))
    >>> plan = cp.plan([3], [5], block_tables=[[2, 0]])      # two cached tokens
    >>> pools = torch.zeros(2, 2, 12, 1, 16)                 # of two layers
    >>> q, k, v = torch.zeros(3, 2, 16), torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)
    >>> prefixes = cp.prefetch(plan, [tuple(layer) for layer in pools])
    >>> for layer in pools:
    ...     out = cp.attend(plan, q, *layer, k_local=k, v_local=v, prefetched=prefixes)
    >>> prefixes.next_layer, prefixes.buffer_bytes           # 2 * 2 rows of 16 + 16 float32
    (2, 512)
    >>> dist.destroy_process_group()
    """

    def __init__(self, exchange: RowExchange, plan: ShardedPlan, layers: list[_Layer]) -> None:
        self.plan = plan
        self.num_layers = len(layers)
        self.next_layer = 0
        self.buffer_bytes = _buffer_bytes(layers)
        self._exchange, self._layers = exchange, layers
        self._arriving = self._begin()

    def term(self) -> int:
        """Return the term that ranks compare in ``attend``."""
        return term((self.next_layer, self.num_layers))

    def check(
        self, exchange: RowExchange, plan: ShardedPlan, keys: ShardKeys, window: int | None
    ) -> None:
        """Refuse an ``attend`` that does not match the rows on their way."""
        call = "ContextParallel.attend: prefetched"
        if self._exchange is not exchange:
            raise ValueError(f"{call} must be of this object, got one of another")
        if self.next_layer == self.num_layers:
            raise ValueError(
                f"{call} must have a layer left, got one with all {self.num_layers} used"
            )
        if exchange.ahead is not self._arriving:
            raise ValueError(f"{call} must be the last one of this object, got one before it")
        if plan != self.plan:
            raise ValueError(f"{call} must be of the plan of this call, got one of another plan")
        layer = self._layers[self.next_layer]
        if _places(layer.keys) != _places(keys):
            raise ValueError(
                f"{call} must have the caches of this call as layer {self.next_layer}, got others"
            )
        if layer.window != window:
            raise ValueError(
                f"{call} must have the window of this call as that of layer {self.next_layer}, "
                f"got {layer.window} for {window}"
            )

    def advance(self) -> tuple[KeyScratch, list[torch.Tensor]]:
        """Return the cached rows of all ranks, valid until the next call, and begin the next layer.

        Call it after posting all other messages of a layer: later messages on the wire wait for
        these rows.
        """
        scratch = self._layers[self.next_layer].scratch
        rows = self._exchange.end_ahead()
        self.next_layer += 1
        self._arriving = self._begin()
        return scratch, rows

    def _begin(self) -> Any:
        if self.next_layer == self.num_layers:
            return None
        layer = self._layers[self.next_layer]
        own = layer.keys.take(layer.scratch.sent_rows[self._exchange.rank])
        parts = [rows.flatten(1) for rows in own]
        return self._exchange.begin_ahead(
            "attend (prefix)", layer.scratch.counts, parts, self.next_layer % 2
        )


def check_prefetched(
    prefetched: Any, exchange: RowExchange, plan: ShardedPlan, inputs: ShardInputs
) -> None:
    """Refuse a prefetch that does not fit an ``attend``."""
    if not isinstance(prefetched, Prefetch):
        raise TypeError(
            "ContextParallel.attend: prefetched must be of ContextParallel.prefetch, got "
            f"{type(prefetched).__name__}"
        )
    prefetched.check(exchange, plan, inputs, inputs.options.left)


def prefetch(exchange: RowExchange, plan: Any, layers: Any) -> Prefetch:
    """Run ContextParallel.prefetch."""
    terms: dict[str, int] = {}
    with exchange.agreement("prefetch", getattr(plan, "terms", NO_TERMS), terms):
        check_rank("prefetch", exchange, plan)
        _check_plan(plan)
        given = items(layers, _CALL, "layers")
        checked = [_checked(plan, number, layer) for number, layer in enumerate(given)]
        if not checked:
            raise ValueError(f"{_CALL}: layers must be one at least, got none")
        _check_scratch(plan, checked)
        terms["exchange"] = digest(f"{_EXCHANGE} {plan.max_scratch_bytes}".encode())
        terms["options"] = term(tuple((_shape(layer.keys), layer.window) for layer in checked))
    with exchange.without_return():
        exchange.end_ahead()
        return Prefetch(exchange, plan, checked)


def _check_plan(plan: Any) -> None:
    if not isinstance(plan, ShardedPlan):
        raise ValueError(f"{_CALL}: plan must be of sharded pools")
    if plan.exchange not in ("auto", _EXCHANGE):
        raise ValueError(
            f"{_CALL}: plan must be of the exchange {_EXCHANGE} or auto, got {plan.exchange}"
        )
    if plan.tokens.are_cached_by_others:
        raise ValueError(
            f"{_CALL}: plan must have no new token that another request has as a cached one, "
            "because it is sent before it is written"
        )


def _checked(plan: ShardedPlan, number: int, layer: Any) -> _Layer:
    name = f"layers[{number}]"
    caches = LayerCaches(*layer) if isinstance(layer, tuple) and 0 < len(layer) <= 4 else None
    if caches is None:
        raise TypeError(
            f"{_CALL}: {name} must be LayerCaches, or a tuple like it, got {type(layer).__name__}"
        )
    pools = {}
    for field in ("k_cache", "v_cache", "k_rope"):
        if (pool := getattr(caches, field)) is None and field != "k_cache":
            continue
        if not isinstance(pool, torch.Tensor):
            what = type(pool).__name__
            raise TypeError(f"{_CALL}: {name}.{field} must be a tensor on the CPU, got {what}")
        check_tensor("prefetch", f"{name}.{field}", pool)
        pools[field] = slots_of("prefetch", f"{name}.{field}", pool)
        if pools[field].shape[1] != pools["k_cache"].shape[1]:
            raise ValueError(
                f"{_CALL}: {name}.{field} must have the {pools['k_cache'].shape[1]} KV heads of "
                f"k_cache, got {pools[field].shape[1]}"
            )
    sides = key_window(caches.window, True, _CALL, f"{name}.window")
    window = sides and sides[0]
    k, v = pools["k_cache"], pools.get("v_cache")
    keys = ShardKeys(k, k if v is None else v, pools.get("k_rope"), v is None)
    plan.batch.check_pool("prefetch", plan.cp_rank, keys.num_slots)
    return _Layer(keys, window, key_scratch(plan, window, CACHED))


def _check_scratch(plan: ShardedPlan, layers: Sequence[_Layer]) -> None:
    """Refuse layers if max_scratch_bytes does not suffice for even one KV head."""
    needed = _buffer_bytes(layers) + max(
        plan.num_tokens * layer.row_bytes + layer.scratch.num_slots * layer.keys.head_bytes
        for layer in layers
    )
    if needed > plan.max_scratch_bytes:
        raise ValueError(
            f"{_CALL}: max_scratch_bytes must be at least {needed}, for the cached keys of two "
            f"layers, new ones, and a KV head in its places, got {plan.max_scratch_bytes}"
        )


def _buffer_bytes(layers: Sequence[_Layer]) -> int:
    return 2 * max(sum(layer.scratch.counts) * layer.row_bytes for layer in layers)


def _tensors(keys: ShardKeys) -> list[torch.Tensor]:
    values = [] if keys.shares_values else [keys.v]
    return [keys.k, *values, *([] if keys.k_rope is None else [keys.k_rope])]


def _places(keys: ShardKeys) -> list[tuple[Any, ...]]:
    """Return the addresses, dtypes and shapes of the tensors."""
    return [(x.data_ptr(), x.dtype, x.shape) for x in _tensors(keys)]


def _shape(keys: ShardKeys) -> tuple[Any, ...]:
    """Return dtypes and shapes, which must be equal on all ranks."""
    shapes = tuple((x.dtype, *x.shape[1:]) for x in _tensors(keys))
    return (*shapes, keys.shares_values, keys.k_rope is None)
