# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.attend` over sharded KV pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..._arguments import has
from ...context_parallel.exchanges import EXCHANGES
from ...kv import PageInterleave, Placement
from ..plans.mesh import Mesh
from ..plans.sharded_plan import ShardedPlan
from ..transport.exchange import RowExchange
from ..transport.terms import digest, term
from . import all_to_all, gather_kv, pass_q, ring, usp
from .choice import choose
from .layer import LayerArguments, RankLayer, checked_layer
from .partials import AttentionOptions, ShardInputs
from .prefetch import Prefetch, check_prefetched
from .sharded_write import send_to_owners

Attend = Callable[[RankLayer[ShardedPlan]], tuple[torch.Tensor, torch.Tensor | None]]

STRATEGIES: dict[str, Attend] = {
    "pass_q": pass_q.attend,
    "gather": gather_kv.attend,
    "ring": ring.attend,
    "all_to_all": all_to_all.attend,
    "usp": usp.attend,
}
_IN_PLACE = next(name for name, exchange in EXCHANGES.items() if exchange.reads_in_place)


def attend_shards(
    exchange: RowExchange,
    plan: ShardedPlan,
    arguments: LayerArguments,
    options: AttentionOptions,
    prefetched: Prefetch | None = None,
) -> Any:
    """Run ContextParallel.attend."""
    terms: dict[str, int] = {}
    with exchange.agreement("attend", plan.terms, terms) as parts:
        layer = checked_layer(exchange, plan, arguments, options)
        inputs, new = layer.inputs, layer.new
        parts.append(inputs.q.flatten(1))
        parts += [] if new is None else new.rows
        wanted = plan.exchange
        if prefetched is not None:
            check_prefetched(prefetched, exchange, plan, inputs)
            wanted, terms["prefetch"] = "gather", prefetched.term()
        name = _exchange_of(plan, wanted, inputs, writes=new is not None)
        terms["exchange"] = digest(f"{name} {plan.max_scratch_bytes} {plan.mesh}".encode())
        chosen = EXCHANGES[name]
        sends_lse = chosen.sends_wanted_lse and arguments.return_lse
        scales: int = inputs.options.has_token_scales  # False: heads go in rounds
        if not chosen.reads_in_place:
            scales = inputs.options.scales_digest()
        terms["options"] = term((inputs.digest(), sends_lse, scales))
    with exchange.without_return():
        # An exchange that writes while it attends sends cached keys first.
        if new is not None and (not chosen.writes or plan.tokens.are_cached_by_others):
            send_to_owners("attend", exchange, plan, new)
            new = None
        layer = replace(layer, new=new, prefetched=prefetched)
        return arguments.outputs(*STRATEGIES[name](layer))


def _exchange_of(plan: ShardedPlan, name: str, inputs: ShardInputs, *, writes: bool) -> str:
    """Return the name of the exchange for a layer; ValueError if it cannot serve the layer."""
    scaled = inputs.options.has_token_scales
    if name == "auto":
        if scaled:
            return _IN_PLACE
        name = choose(plan, inputs.sizes(), window=inputs.options.left, writes=writes).exchange
    if scaled and not EXCHANGES[name].reads_in_place:
        raise ValueError(
            f"ContextParallel.attend: k_scale and v_scale of each token need the exchange "
            f"{_IN_PLACE}, got {name}"
        )
    return name


def check_placement(
    placement: Placement | None, exchange: str, cp_size: int, page_size: int, mesh: Mesh | None
) -> None:
    """Refuse invalid placements and exchanges of `ContextParallel`."""
    if exchange not in ("auto", *EXCHANGES):
        raise ValueError(
            f"ContextParallel: exchange must be one of auto, {', '.join(EXCHANGES)}, got "
            f"{exchange!r}"
        )
    if exchange != "auto" and EXCHANGES[exchange].needs_mesh and mesh is None:
        raise ValueError(
            f"ContextParallel: exchange {exchange!r} needs a DeviceMesh with the dimensions ring "
            "and heads as group"
        )
    if placement is None:
        return
    missing = [
        name for name in ("shard_size", "owner_of", "local_index") if not has(placement, name)
    ]
    if missing:
        raise TypeError(
            f"ContextParallel: placement must have {', '.join(missing)}, got "
            f"{type(placement).__name__}"
        )
    if placement.shard_size != cp_size:
        raise ValueError(
            f"ContextParallel: placement must be over the {cp_size} ranks of the group, got "
            f"shard_size {placement.shard_size}"
        )
    if isinstance(placement, PageInterleave) and placement.page_size != page_size:
        raise ValueError(
            f"ContextParallel: placement must have the page_size {page_size}, got "
            f"{placement.page_size}"
        )
