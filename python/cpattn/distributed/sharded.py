# SPDX-License-Identifier: Apache-2.0
"""The calls of `ContextParallel` over sharded KV pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core
from .._arguments import at_least, flag, key_window
from .._types import Window
from ..context_parallel.exchanges import LSE_BYTES
from ..profiling.calls import announced
from .layers.choice import ExchangeChoice, SparseSizes, choose, choose_sparse, choose_state_exchange
from .layers.decode_states import OUT_HEADS
from .layers.prefetch import LayerCaches, Prefetch, prefetch
from .plans.plan import ContextParallelPlan
from .plans.sharded_plan import DecodePlan, ShardedPlan
from .transport.exchange import RowExchange


class ShardedAttention:
    """Calls of `ContextParallel` with a placement."""

    _exchange: RowExchange

    @announced("ContextParallel.prefetch")
    def prefetch(
        self, plan: ContextParallelPlan, layers: Sequence[LayerCaches | tuple[Any, ...]]
    ) -> Prefetch:
        """Gather cached keys of layers ahead, each layer while the previous one is computed.

        Keys of the first layer begin to travel now. Keys of every other layer travel during the
        ``attend`` of the previous layer, after its new keys, and may take until their own
        ``attend``. All ranks make this call, then ``attend(..., prefetched=)`` for each layer in
        turn. Calls in between queue their messages behind those under way.

        Parameters
        ----------
        plan : ShardedPlan
            The result of this object's `plan`, with `exchange` "gather" or "auto" (then "gather").
        layers : sequence of LayerCaches, or of tuples like them
            This rank's shards, layer by layer. Cached keys of a layer must be in its shards before
            ``attend`` of the previous layer. A layer of latents has no `v_cache`.

        Returns
        -------
        Prefetch
            Handle for ``attend``. It has two buffers, each for the cached keys of all ranks in one
            layer; all scratch stays within `max_scratch_bytes`. A new call replaces the last
            handle, which all ranks may leave unfinished at the same layer.

        Raises
        ------
        TypeError
            If `plan` is no plan, an element of `layers` is no layer, or a cache is no tensor.
        ValueError
            If the plan is of another rank, of replicated pools or with another exchange, there are
            no layers, caches are too small or not contiguous, or `max_scratch_bytes` is less than
            the cached keys of two layers, the new keys and one KV head in places of the layer.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan or other
            layers, or does not answer.
        """
        return prefetch(self._exchange, plan, layers)

    def choose_exchange(
        self,
        plan: ContextParallelPlan | DecodePlan,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        element_bytes: int = 2,
        shares_values: bool = False,
        window: Window = None,
        writes: bool = False,
        out_heads: str = "all",
    ) -> ExchangeChoice:
        """Return the exchange that ``attend`` or ``decode`` takes for "auto", and why. Local.

        A decode step takes the exchange with which the busiest rank receives the fewest bytes of
        partial results. "all_to_all" has a second round for the heads of all ranks, which counts as
        256 KiB, so small steps take "gather".

        A prefill takes the first of "gather", "all_to_all" and "pass_q" with which the busiest rank
        receives the fewest bytes: for few new tokens after long prefixes, queries have fewer bytes
        than keys. Each element of a partial result to merge counts as 3 bytes. "all_to_all" is left
        out if heads do not divide evenly. "ring" replaces "gather" if a KV head of the context
        exceeds `max_scratch_bytes`. Scales of each token need "pass_q". Separate rotary dimensions
        of keys count as dimensions of keys.

        Parameters
        ----------
        plan : ShardedPlan or DecodePlan
            The result of this object's `plan` or `plan_decode`.
        num_heads, num_kv_heads, head_dim, v_head_dim : int
            Sizes of the layer. Default of v_head_dim: head_dim.
        element_bytes : int
            Bytes of an element of queries, keys and values.
        shares_values : bool
            Whether values are a part of the keys, as in the latent cache of MLA.
        window : int or pair, optional
            Window of ``attend``. "gather" and "all_to_all" do not send keys before the window of a
            request's first new token.
        writes : bool
            Whether ``attend`` also gets `k_local`, which "gather" then sends only once.
        out_heads : {"all", "own"}
            The argument of ``decode``.

        Returns
        -------
        ExchangeChoice
            Name of the exchange, the reason, and the bytes of each exchange.

        Raises
        ------
        TypeError
            If a size is no integer, or a flag is no bool.
        ValueError
            If the plan is of replicated pools, a size is below 1, `num_heads` is no multiple of
            `num_kv_heads`, or `out_heads` is unknown.
        """
        call = "ContextParallel.choose_exchange"
        if out_heads not in OUT_HEADS:
            raise ValueError(
                f"{call}: out_heads must be one of {', '.join(OUT_HEADS)}, got {out_heads!r:.40}"
            )
        if not isinstance(plan, ShardedPlan | DecodePlan):
            raise ValueError(f"{call}: plan must be of sharded pools")
        given = {
            "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "v_head_dim": head_dim if v_head_dim is None else v_head_dim,
            "element_bytes": element_bytes,
        }  # fmt: skip
        heads, kv_heads, dim, v_dim, item = (
            at_least(1, value, call, name) for name, value in given.items()
        )
        key = (dim + (0 if flag(shares_values, call, "shares_values") else v_dim)) * item
        if heads % kv_heads:
            raise ValueError(
                f"{call}: num_heads must be a multiple of num_kv_heads, got {num_heads} and "
                f"{num_kv_heads}"
            )
        sizes = _core.LayerBytes(heads, kv_heads, dim * item, key, v_dim * item, v_dim)
        if isinstance(plan, DecodePlan):
            return choose_state_exchange(plan, sizes, out_heads)
        sides = key_window(window, True, call, "window")
        return choose(plan, sizes, window=sides and sides[0], writes=flag(writes, call, "writes"))

    def choose_sparse_exchange(
        self,
        plan: ContextParallelPlan,
        *,
        topk: int,
        num_heads: int,
        num_index_heads: int,
        head_dim: int = 576,
        d_v: int = 512,
        index_head_dim: int = 128,
        element_bytes: int = 2,
        index_element_bytes: int = 2,
        weight_bytes: int = 4,
        latent_bytes: int | None = None,
        index_key_bytes: int | None = None,
    ) -> ExchangeChoice:
        """Return the exchange that ``attend_sparse`` takes for "auto", and why. Local.

        The layer takes "gather" or "pass_q": the one with which the busiest rank receives fewer
        bytes if no two of its rows select the same key. On a tie it takes "gather", which has the
        bits of one pool. "pass_q" replaces "gather" if the index keys exceed `max_scratch_bytes`.

        Parameters
        ----------
        plan : ShardedPlan
            The result of this object's `plan`.
        topk : int
            Number of keys that a row selects.
        num_heads, num_index_heads : int
            Heads of attention queries and of indexer queries.
        head_dim, d_v, index_head_dim : int
            Dimensions of a query, of a result, and of a query and key of the indexer.
        element_bytes, index_element_bytes, weight_bytes : int
            Bytes per element of queries and results, of indexer queries, and of indexer weights.
        latent_bytes : int, optional
            Bytes of a row of the KV pool. Default: `head_dim` elements. Rows of FP8 have 656.
        index_key_bytes : int, optional
            Bytes of an index key with its scale. Default: `index_head_dim` elements without a
            scale. Pages of FP8 have 132 per key.

        Returns
        -------
        ExchangeChoice
            Name of the exchange, the reason, and the bytes of each exchange.

        Raises
        ------
        TypeError
            If a size is no integer.
        ValueError
            If the plan is of replicated pools or of a decode step, or a size is below 1.

        Examples
        --------
        >>> import torch.distributed as dist
        >>> from cpattn.distributed import ContextParallel
        >>> from cpattn.kv import PageInterleave
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = ContextParallel(dist.group.WORLD, page_size=64,
        ...                      placement=PageInterleave(shard_size=1, page_size=64))
        >>> plan = cp.plan([100], block_tables=[[0, 1]])
        >>> cp.choose_sparse_exchange(plan, topk=64, num_heads=128, num_index_heads=64).exchange
        'gather'
        >>> dist.destroy_process_group()
        """
        call = "ContextParallel.choose_sparse_exchange"
        if not isinstance(plan, ShardedPlan):
            raise ValueError(f"{call}: plan must be of new tokens over sharded pools")
        given = {
            "topk": topk, "num_heads": num_heads, "num_index_heads": num_index_heads,
            "head_dim": head_dim, "d_v": d_v, "index_head_dim": index_head_dim,
            "element_bytes": element_bytes, "index_element_bytes": index_element_bytes,
            "weight_bytes": weight_bytes,
        }  # fmt: skip
        n = {name: at_least(1, value, call, name) for name, value in given.items()}
        latent = n["head_dim"] * n["element_bytes"] if latent_bytes is None else latent_bytes
        key = index_head_dim * index_element_bytes if index_key_bytes is None else index_key_bytes
        index_query = n["index_head_dim"] * n["index_element_bytes"]
        sizes = SparseSizes(
            topk=n["topk"],
            query_bytes=n["num_heads"] * n["head_dim"] * n["element_bytes"],
            result_bytes=n["num_heads"] * (n["d_v"] * n["element_bytes"] + LSE_BYTES),
            asking_bytes=n["num_index_heads"] * (index_query + n["weight_bytes"]),
            latent_bytes=at_least(1, latent, call, "latent_bytes"),
            index_key_bytes=at_least(1, key, call, "index_key_bytes"),
        )
        return choose_sparse(plan, sizes)
