# SPDX-License-Identifier: Apache-2.0
"""The calls of an engine: plan, shard, write_kv, attend, gather."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import at_least, flag
from .._types import Reals
from ..context_parallel.metadata import build_cp_metadata
from ..kv import Placement
from ..profiling.calls import announced
from .attention import RankAttention
from .decode_calls import DecodeCalls
from .layers.rows import plan_rows
from .layers.sharded_attend import check_placement
from .layers.sharded_write import write_own, write_shards
from .layers.shared_rows import SharedRows, shared_digest
from .plans.mesh import group_and_mesh
from .plans.plan import ContextParallelPlan, make_plan
from .plans.sharded_plan import DecodePlan, ShardedPlan, check_rank, shard_plan
from .row_calls import RowCalls
from .sharded import ShardedAttention
from .transport.exchange import RowExchange
from .transport.host import TRANSPORTS
from .transport.terms import NO_TERMS


class ContextParallel(RankAttention, ShardedAttention, DecodeCalls, RowCalls):
    """Context-parallel attention over the ranks of a given process group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or DeviceMesh
        A group of this process, of any backend that moves CPU tensors between two ranks. Its size
        is cp_size; its timeout bounds every wait. Of a mesh of one dimension, the group of that; of
        one with the dimensions "ring" and "heads", in either order, the group of all its ranks,
        which are in two dimensions then. If they are not all of the default group, they get a group
        with its timeout, for which all of them make the object at the same time.
    strategy : {"zigzag", "interleave", "contiguous"} or an alias
        Which tokens each rank has, as in `build_cp_metadata`; `plan` refuses unknown ones.
    page_size : int
        Token slots per page of the KV pools, at least 1.
    weights : floats [cp_size], optional
        Speed of each rank, as in `build_cp_metadata`; the same on every rank.
    whole_pages : bool
        Whether tokens are cut where pages begin, as in `build_cp_metadata` with this `page_size`.
    placement : optional
        Which rank holds which slot, such as `cpattn.kv.PageInterleave`, where each rank's pools
        have a share of the keys alone. Block tables and slots are logical ones then, ``write_kv``
        sends rows to their owners only, and ``attend`` exchanges. Default: every rank holds all.
    exchange : {"auto", "pass_q", "gather", "ring", "all_to_all", "usp"}
        How queries and sharded keys meet: see `choose_exchange`, by which "auto" goes. "usp" needs
        a mesh with "ring" and "heads": heads are shared out along the latter, and keys passed on
        along the former.
    max_scratch_bytes : int
        What "gather" may take for keys at a time, if one KV head fits: on a rank, or together with
        those that share its memory, where `topology` has found that out.
    transport : {"auto", "tcp", "shm"}
        Whether ranks may share memory, for pools of `shared_memory`: "auto" shares among the ranks
        of each host, "tcp" does not; "shm" insists that all ranks are on one host and share it, and
        all make the object at the same time. The same on every rank.

    Attributes
    ----------
    strategy, page_size, weights, whole_pages, placement, exchange, max_scratch_bytes, transport
        As given.
    group : torch.distributed.ProcessGroup
        As given, or that of all ranks of the mesh.
    mesh : tuple of tuples of int, or None
        Ranks of the group in rows, one for each place on the ring, where they are in two
        dimensions.
    cp_rank, cp_size : int
        The rank of this process within the group, and the number of ranks.
    sent_bytes, received_bytes : int
        What all calls so far have sent to other ranks and received from them, agreements among it:
        bytes of tensors, without those that a backend and its network add.

    Raises
    ------
    TypeError
        If `group` is no ProcessGroup and no DeviceMesh, or `page_size` no integer.
    ValueError
        If `page_size` is below 1, or `transport` unknown; for a mesh of other dimensions or without
        this rank, and "usp" without a mesh.
    RuntimeError
        For "shm", if the ranks cannot share memory, saying why.

    Notes
    -----
    Any lengths give the exact result. Requests shorter than 2 * cp_size leave blocks empty, up to
    ranks without a row; whether that pays is for ``can_apply_cp`` to say, and is not asked here.

    Rows travel point to point and land where they are read, so uneven and empty shares need no
    padding, and as bytes, so every dtype does. Over gloo, 16 MiB per rank take a third of the time
    of an all-gather.

    A rank that does not answer within the group's timeout, is gone, or fails behind the checks, as
    for want of memory, is a RuntimeError on all others that names it; the group cannot be used any
    more. Whoever misses a rank tells the others, so that all name the same one, and at once. Caches
    of a rank are then as before the call or have all of its rows, but for the new slots of shared
    pools, which are lost.

    A rank that makes another call, or the same one with another plan or other rows, or has another
    version of cpattn, or whose arguments are refused, is a RuntimeError on every rank before any
    row is sent, but for the rank that refuses them, which has its own error; the group stays
    usable. Ranks in messages are ranks of the group.

    Use from one thread at a time. Receive buffers are kept for the next call.

    Examples
    --------
    A group of one rank; others are started by ``torchrun`` and do the same:

    >>> import torch, torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, strategy="zigzag", page_size=4)
    >>> plan = cp.plan([5], block_tables=[[2, 0]])
    >>> q, k = torch.zeros(5, 2, 16), torch.zeros(5, 1, 16)
    >>> v = torch.arange(5.0)[:, None, None].repeat(1, 1, 16)
    >>> q, k, v = (cp.shard(plan, x) for x in (q, k, v))
    >>> k_cache, v_cache = torch.zeros(12, 1, 16), torch.zeros(12, 1, 16)
    >>> cp.write_kv(plan, k, v, k_cache, v_cache)
    >>> out = cp.gather(plan, cp.attend(plan, q, k_cache, v_cache))
    >>> out[:, 0, 0]                # means of the values up to each token
    tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        *,
        strategy: str = "zigzag",
        page_size: int,
        weights: Reals | None = None,
        whole_pages: bool = False,
        placement: Placement | None = None,
        exchange: str = "auto",
        max_scratch_bytes: int = 256 << 20,
        transport: str = "auto",
    ) -> None:
        group, self.mesh = group_and_mesh(group)
        if index(page_size) < 1:
            raise ValueError(f"ContextParallel: page_size must be positive, got {page_size}")
        if transport not in TRANSPORTS:
            raise ValueError(
                f"ContextParallel: transport must be {', '.join(TRANSPORTS)}, got {transport!r:.40}"
            )
        self.group = group
        self.strategy = strategy
        self.page_size = page_size
        self.weights = weights
        self.whole_pages = flag(whole_pages, "ContextParallel", "whole_pages")
        self.transport = transport
        self._exchange = RowExchange(group, through_memory=transport != "tcp")
        self.cp_rank = self._exchange.rank
        self.cp_size = self._exchange.size
        check_placement(placement, exchange, self.cp_size, self.page_size, self.mesh)
        self.placement = placement
        self.exchange = exchange
        self.max_scratch_bytes = at_least(
            1, max_scratch_bytes, "ContextParallel", "max_scratch_bytes"
        )
        if transport == "shm" and (topology := self.topology()).transport != "shm":
            raise RuntimeError(
                f"ContextParallel: ranks cannot share memory (transport='shm'): {topology.reason}"
            )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank's calls have sent to other ranks."""
        return self._exchange.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank's calls have received from other ranks."""
        return self._exchange.received_bytes

    @announced("ContextParallel.plan")
    def plan(
        self,
        extend_lens: Any,
        seq_lens: Any = None,
        *,
        block_tables: Any,
        out_cache_loc: Any = None,
        num_tokens: int | None = None,
        pad_to_physical: bool = False,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
    ) -> ContextParallelPlan:
        """Plan one batch. Local: that the ranks' plans differ shows at their first exchange.

        Parameters
        ----------
        extend_lens : ints [bs]
            New tokens of each request, zero allowed.
        seq_lens : ints [bs], optional
            Cached prefix and new tokens of each request. Default: no prefixes.
        block_tables : ints [bs, >= ceil(max(seq_lens) / page_size)]
            Pages of each request. Entries after its last page may be anything. Requests may share
            what is cached, not a slot that this batch writes.
        out_cache_loc : ints [num_tokens], optional
            Pool row of each new token, -1 to leave it unwritten. Except for padding tokens it must
            be the row where the block tables have the token, else attention would not find it.
            Default: that row, and -1 for padding tokens.
        num_tokens : int, optional
            New tokens with padding, which counts as tokens of the last request. Default: their sum.
            Padding tokens see what the pool holds after that request; no other token does.
        pad_to_physical : bool
            ``shard`` and ``attend`` give every rank the same number of rows, see
            ``ContextParallelMetadata.pad_to_physical``.
        custom_mask, packed_custom_mask : tensors, optional
            Which keys tokens see, as `cpattn.paged_attention` takes them: for each request
            ``extend_lens`` rows of ``seq_lens`` values. The same on every rank, of which each takes
            its rows; copied. Padding tokens see nothing then, and nobody sees them.

        Returns
        -------
        ContextParallelPlan
            Of this rank; for all layers. A `ShardedPlan` where there is a placement.

        Raises
        ------
        TypeError
            For lengths, tables, slots or a number that are no integers, a mask that is no tensor,
            and a flag that is no bool.
        ValueError
            For an unknown strategy, weights that are not finite and above 0, fewer pages with new
            tokens than ranks under `whole_pages`, lengths that do not match, negative page ids,
            tables that are too narrow, tokens that share a slot, slots other than those of the
            tables, and a mask of another dtype or size.
        """
        if isinstance(extend_lens, list):
            extend_lens = tuple(extend_lens)  # it is read twice, and its elements may change it
        metadata = build_cp_metadata(
            extend_lens,
            seq_lens,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
            strategy=self.strategy,
            num_tokens=num_tokens,
            weights=self.weights,
            page_size=self.page_size if self.whole_pages else None,
        )
        plan = make_plan(
            metadata,
            extend_lens,
            block_tables=block_tables,
            out_cache_loc=out_cache_loc,
            page_size=self.page_size,
            pad_to_physical=flag(pad_to_physical, "ContextParallel.plan", "pad_to_physical"),
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
        )
        if self.placement is None:
            return plan
        return shard_plan(
            plan,
            placement=self.placement,
            exchange=self.exchange,
            max_scratch_bytes=self.max_scratch_bytes,
            mesh=self.mesh,
        )

    def shard(self, plan: ContextParallelPlan, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Take the rows of this rank. Local.

        Parameters
        ----------
        plan : ContextParallelPlan
            Of this object's `plan`.
        x : tensor with num_tokens rows along `dim`, of any dtype
            Hidden states, positions, ... of all tokens.
        dim : int
            The token dimension.

        Returns
        -------
        tensor, num_local_rows rows along `dim`
            Further ones of zeros if the plan pads to physical rows.

        Raises
        ------
        TypeError
            If `plan` is no plan or x no tensor.
        ValueError
            For a plan of another rank, another number of rows, and a dimension that x has not.
        """
        check_rank("shard", self._exchange, plan)
        return plan.metadata.shard(x, dim)

    @announced("ContextParallel.write_kv")
    def write_kv(
        self,
        plan: ContextParallelPlan | DecodePlan,
        k_local: torch.Tensor,
        v_local: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor | None,
    ) -> None:
        """Exchange the keys and values of the new tokens once; write all into this rank's pool.

        Any two tensors of the tokens may travel so, such as latents and index keys. Latents alone,
        whose values are a part of the keys, are k_local and k_cache; the other two are None then.

        Parameters
        ----------
        plan : ContextParallelPlan or DecodePlan
            Of this object's `plan`, for the same batch on every rank. Of `plan_decode`, the call is
            local: every rank has the rows of all tokens, and writes those whose slots it holds.
        k_local, v_local : tensors [>= num_local_rows, num_kv_heads, head_dim]
            In the order of ``shard``; further rows are never read. Heads and dimensions of values
            may differ from those of keys.
        k_cache, v_cache : tensors [num_slots, num_kv_heads, head_dim], contiguous
            Or [num_pages, page_size, num_kv_heads, head_dim], or [num_slots, 1, num_kv_heads,
            head_dim], as KV pools have them with and without the FIA layout; of the dtype of the
            rows. Written at ``plan.slots`` and nowhere else; not at all on an error. With a
            placement, this rank's shards, written at the local rows of the slots that it holds.

        Raises
        ------
        TypeError
            For rows that are not on the CPU.
        ValueError
            For too few rows, values without a cache or the other way round, a plan of another rank,
            and caches of other shapes or dtypes than the rows, that are not contiguous, or that are
            too small for the slots.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan or other
            rows, or does not answer.

        Notes
        -----
        Caches in memory that the ranks of a host share, of pools with `shared_memory`, get the rows
        of each rank there from itself, and those of other hosts from whoever receives them: the
        k-th rank of a host those of the k-th of every other one, so that each row comes to a host
        once. No row is written before every rank has entered the call, so none overwrites what
        another rank still reads in a call of its own before this one; and the call returns when all
        rows are written, so those of all ranks are seen behind it.
        """
        if isinstance(plan, DecodePlan):
            check_rank("write_kv", self._exchange, plan, DecodePlan)
            write_own(plan, k_local, v_local, k_cache, v_cache)
            return
        if isinstance(plan, ShardedPlan):
            write_shards(self._exchange, plan, k_local, v_local, k_cache, v_cache)
            return
        host = self._exchange.host()
        with self._exchange.agreement("write_kv", getattr(plan, "terms", NO_TERMS)) as parts:
            check_rank("write_kv", self._exchange, plan)
            new = plan_rows("write_kv", plan, (k_local, v_local), (k_cache, v_cache))
            parts += new.rows
            parts.shared_memory = shared_digest(host, "write_kv", k_cache, v_cache)
        with self._exchange.without_return():
            if host is not None and parts.shared_memory:
                shared = SharedRows("write_kv", self._exchange, host, plan, new)
                arriving = shared.begin(new.rows)
                shared.write_own()
                shared.finish(arriving)
            else:
                new.store(self._exchange.all_rows("write_kv", plan.rows_per_rank, parts))
