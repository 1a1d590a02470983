# SPDX-License-Identifier: Apache-2.0
"""The calls of `ContextParallel` over KV pools of which each rank holds a share."""

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
        """Gather cached keys of layers ahead: of each while the one before is computed.

        Those of the first layer begin to travel now, and those of each other one in the ``attend``
        of the layer before, behind its new keys. Until the ``attend`` of their own layer they have
        the time of all that ranks compute: the layer before, and what is between the two. All ranks
        make this call, then ``attend(..., prefetched=)`` of each layer in its turn. Calls between
        these send behind what is under way.

        Parameters
        ----------
        plan : ShardedPlan
            The result of this object's `plan`, by the exchange "gather" or "auto" (then "gather").
        layers : sequence of LayerCaches, or of tuples like them
            This rank's shards for each layer, in their order. What is cached of a layer must be in
            them when the layer before is attended to. A layer of latents has no `v_cache`.

        Returns
        -------
        Prefetch
            For ``attend``. It takes two buffers, each of the cached keys of all ranks in one layer;
            all scratch is within `max_scratch_bytes`. This object has one at a time: another call
            ends the last one, which may be left at any layer, by all ranks.

        Raises
        ------
        TypeError
            If `plan` is no plan, and for layers that are none or whose caches are no tensors.
        ValueError
            For a plan of another rank, of replicated pools or with another exchange, no layers,
            caches that are too small or not contiguous, and where two layers' cached keys, new keys
            and one KV head in its places exceed `max_scratch_bytes`.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan or other
            layers, or does not answer.

        Examples
        --------
        See `Prefetch`.
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
        """Return what ``attend`` or ``decode`` with the exchange "auto" does, and why. Local.

        A decode step takes the exchange by which the busiest rank receives the fewest bytes of
        partial results. "all_to_all" has a second round for the heads of all ranks, which counts
        as 256 KiB, so that small steps take "gather".

        A prefill takes the one of "gather", "all_to_all" and "pass_q" by which the busiest rank
        receives the fewest bytes, the first of equal ones: with few new tokens behind long
        prefixes, queries are fewer bytes than keys. Each element of a partial result that is
        merged counts as 3 bytes. "all_to_all" is left out where heads are uneven. "ring" takes the
        place of "gather" where a KV head of the context does not fit into `max_scratch_bytes`.
        Scales of each token need "pass_q". Rotary dimensions of keys that are stored apart count
        as those of keys.

        Parameters
        ----------
        plan : ShardedPlan or DecodePlan
            The result of this object's `plan` or `plan_decode`.
        num_heads, num_kv_heads, head_dim, v_head_dim : int
            Sizes of the layer; v_head_dim is head_dim if it is not given.
        element_bytes : int
            Bytes of an element of queries, keys and values.
        shares_values : bool
            Whether values are a part of the keys, as in the latent cache of MLA.
        window : int or pair, optional
            As of ``attend``: keys before the window of a request's first new token are not sent by
            "gather" and "all_to_all".
        writes : bool
            Whether ``attend`` gets `k_local`, too, which "gather" then does not send twice.
        out_heads : {"all", "own"}
            The argument of ``decode``.

        Returns
        -------
        ExchangeChoice
            Its name, the reason, and the bytes of each exchange.

        Raises
        ------
        TypeError
            For sizes that are no integers, and a flag that is no bool.
        ValueError
            For a plan of replicated pools, sizes below 1, KV heads that do not divide the heads,
            and unknown `out_heads`.
        """
        call = "ContextParallel.choose_exchange"
        if out_heads not in OUT_HEADS:
            raise ValueError(
                f"{call}: out_heads must be one of {', '.join(OUT_HEADS)}, got {out_heads!r:.40}"
            )
        if not isinstance(plan, ShardedPlan | DecodePlan):
            raise ValueError(f"{call}: plan must be of sharded pools")
        given = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "v_head_dim": head_dim if v_head_dim is None else v_head_dim,
            "element_bytes": element_bytes,
        }
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
        """Return what ``attend_sparse`` with the exchange "auto" does, and why. Local.

        The layer takes "gather" or "pass_q", by which the busiest rank receives fewer bytes if no
        two of its rows select the same key; of equal ones "gather", which has the bits of one pool.
        "pass_q" takes its place where the index keys do not fit into `max_scratch_bytes`.

        Parameters
        ----------
        plan : ShardedPlan
            The result of this object's `plan`.
        topk : int
            Keys that a row selects.
        num_heads, num_index_heads : int
            Heads of the queries, and of those of the indexer.
        head_dim, d_v, index_head_dim : int
            Dimensions of a query, of a result, and of a query and key of the indexer.
        element_bytes, index_element_bytes, weight_bytes : int
            Bytes of an element of queries and results, of queries of the indexer, and of weights.
        latent_bytes : int, optional
            Bytes of a row of the KV pool. Default: `head_dim` elements; 656 for rows of FP8.
        index_key_bytes : int, optional
            Bytes of an index key and its scale. Default: `index_head_dim` elements alone; 132 for
            pages of FP8.

        Returns
        -------
        ExchangeChoice
            Its name, the reason, and the bytes of each exchange.

        Raises
        ------
        TypeError
            For sizes that are no integers.
        ValueError
            For a plan of replicated pools or of a decode step, and sizes below 1.

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
            "topk": topk,
            "num_heads": num_heads,
            "num_index_heads": num_index_heads,
            "head_dim": head_dim,
            "d_v": d_v,
            "index_head_dim": index_head_dim,
            "element_bytes": element_bytes,
            "index_element_bytes": index_element_bytes,
            "weight_bytes": weight_bytes,
        }
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
