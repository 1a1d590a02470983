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
        A group of this process; its backend must send CPU tensors between two ranks. Its size is
        cp_size, and its timeout bounds every wait. A mesh of one dimension stands for its group. A
        mesh with the dimensions "ring" and "heads", in either order, stands for the group of all
        its ranks. If the mesh lacks ranks of the default group, its ranks get a new group with the
        default timeout, and all of them must make the object at the same time.
    strategy : {"zigzag", "interleave", "contiguous"} or an alias
        Distribution of tokens over ranks, as in `build_cp_metadata`; `plan` refuses unknown ones.
    page_size : int
        Token slots per page of the KV pools, at least 1.
    weights : floats [cp_size], optional
        Speed of each rank, as in `build_cp_metadata`; the same on every rank.
    whole_pages : bool
        Whether to cut tokens at page borders only, as in `build_cp_metadata` with this `page_size`.
    placement : optional
        Placement of slots on ranks, such as `cpattn.kv.PageInterleave`, if the pool of each rank
        holds only a share of the keys. Block tables and slots are then logical, ``write_kv`` sends
        rows to their owners only, and ``attend`` communicates. Default: every rank holds all keys.
    exchange : {"auto", "pass_q", "gather", "ring", "all_to_all", "usp"}
        Communication of queries with sharded keys; "auto" takes what `choose_exchange` returns.
        "usp" needs a mesh with "ring" and "heads": the dimension "heads" splits the heads, and keys
        travel along the dimension "ring".
    max_scratch_bytes : int
        Bytes that "gather" may use for keys at a time, provided that one KV head fits. The limit
        counts for a rank, or for all ranks of a host once `topology` has found that they share it.
    transport : {"auto", "tcp", "shm"}
        Whether ranks share memory for pools of `shared_memory`: "auto" shares among the ranks of
        each host, "tcp" never. "shm" requires that all ranks share the memory of one host and that
        all of them make the object at the same time. Every rank must give the same value.

    Attributes
    ----------
    strategy, page_size, weights, whole_pages, placement, exchange, max_scratch_bytes, transport
        As given.
    group : torch.distributed.ProcessGroup
        As given, or the group of all ranks of the mesh.
    mesh : tuple of tuples of int, or None
        Ranks of the group in a row for each place on the ring; None without a mesh of two
        dimensions.
    cp_rank, cp_size : int
        The rank of this process within the group, and the number of ranks.
    sent_bytes, received_bytes : int
        Bytes of tensors that all calls so far have sent to other ranks and received from them,
        agreements included. Bytes that a backend and its network add do not count.

    Raises
    ------
    TypeError
        If `group` is neither a ProcessGroup nor a DeviceMesh, or `page_size` is no integer.
    ValueError
        If `page_size` is below 1, `transport` is unknown, the mesh has other dimensions or lacks
        this rank, or `exchange` is "usp" without a mesh.
    RuntimeError
        If `transport` is "shm" and the ranks cannot share memory; the message gives the reason.

    Notes
    -----
    The result is exact for any lengths. Requests shorter than 2 * cp_size leave blocks empty, even
    all blocks of a rank; ``can_apply_cp`` tells whether context parallelism pays for a batch.

    Rows travel point to point, as bytes, straight to the place where they are read. Uneven and
    empty shares therefore need no padding, and every dtype works. Over gloo, 16 MiB per rank take a
    third of the time of an all-gather.

    All other ranks raise RuntimeError, with the number of the rank, if a rank exits, fails after
    the checks (for lack of memory, say) or does not answer within the group's timeout. The first
    rank to notice tells the others, so all name the same rank at once. The group is then unusable.
    The caches of a rank are as before the call or have all its rows; new slots of shared pools are
    lost.

    Every rank raises RuntimeError, before any row is sent, if ranks differ in the call, plan, rows
    or version of cpattn, or if a rank refuses its arguments; the refusing rank raises its own
    error instead. The group stays usable. Rank numbers in messages count within the group.

    Use the object from one thread at a time. It keeps receive buffers for the next call.

    Examples
    --------
    A group of one rank; ``torchrun`` starts larger groups, whose ranks run the same code:

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
        """Plan one batch, locally; the first exchange detects plans that differ between ranks.

        Parameters
        ----------
        extend_lens : ints [bs]
            New tokens of each request, zero allowed.
        seq_lens : ints [bs], optional
            Cached prefix and new tokens of each request. Default: no prefixes.
        block_tables : ints [bs, >= ceil(max(seq_lens) / page_size)]
            Pages of each request. Entries after its last page may have any value. Requests may
            share cached pages, but not a slot that this batch writes.
        out_cache_loc : ints [num_tokens], optional
            Pool row of each new token, -1 to leave it unwritten. Rows of all but padding tokens
            must agree with the block tables, where attention looks for the token. Default: the rows
            of the block tables, and -1 for padding tokens.
        num_tokens : int, optional
            New tokens including padding, which counts as tokens of the last request. Default: the
            sum of `extend_lens`. Only padding tokens see the pool rows after that request.
        pad_to_physical : bool
            Whether ``shard`` and ``attend`` give every rank the same number of rows, see
            ``ContextParallelMetadata.pad_to_physical``.
        custom_mask, packed_custom_mask : tensors, optional
            Mask of visible keys, as in `cpattn.paged_attention`: for each request ``extend_lens``
            rows of ``seq_lens`` values. Every rank passes the mask of all tokens; the plan copies
            the rows of its own. Padding tokens then see no key, and no token sees them.

        Returns
        -------
        ContextParallelPlan
            Plan of this rank, for all layers; a `ShardedPlan` with a placement.

        Raises
        ------
        TypeError
            If lengths, tables, slots or `num_tokens` are no integers, a mask is no tensor, or a
            flag is no bool.
        ValueError
            If the strategy is unknown, a weight is not finite and above 0, `whole_pages` leaves
            fewer pages with new tokens than ranks, lengths do not match, a page id is negative,
            tables are too narrow, tokens share a slot, slots disagree with the tables, or a mask
            has another dtype or size.
        """
        if isinstance(extend_lens, list):
            extend_lens = tuple(extend_lens)  # it is read twice, and its elements may change it
        metadata = build_cp_metadata(
            extend_lens, seq_lens, cp_rank=self.cp_rank, cp_size=self.cp_size,
            strategy=self.strategy, num_tokens=num_tokens, weights=self.weights,
            page_size=self.page_size if self.whole_pages else None,
        )  # fmt: skip
        plan = make_plan(
            metadata, extend_lens, block_tables=block_tables, out_cache_loc=out_cache_loc,
            page_size=self.page_size,
            pad_to_physical=flag(pad_to_physical, "ContextParallel.plan", "pad_to_physical"),
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask,
        )  # fmt: skip
        if self.placement is None:
            return plan
        return shard_plan(
            plan, placement=self.placement, exchange=self.exchange,
            max_scratch_bytes=self.max_scratch_bytes, mesh=self.mesh,
        )  # fmt: skip

    def shard(self, plan: ContextParallelPlan, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Take the rows of this rank, without communication.

        Parameters
        ----------
        plan : ContextParallelPlan
            The result of this object's `plan`.
        x : tensor with num_tokens rows along `dim`, of any dtype
            Hidden states, positions, ... of all tokens.
        dim : int
            The token dimension.

        Returns
        -------
        tensor, num_local_rows rows along `dim`
            Rows of zeros follow if the plan pads to physical rows.

        Raises
        ------
        TypeError
            If `plan` is no plan or `x` no tensor.
        ValueError
            If the plan is of another rank, or `x` has another number of rows or lacks `dim`.
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

        The two tensors may hold other rows of the tokens, such as latents and index keys. Pass
        latents alone, whose values are a part of the keys, as k_local and k_cache with None for
        v_local and v_cache.

        Parameters
        ----------
        plan : ContextParallelPlan or DecodePlan
            The result of `plan`, for the same batch on every rank; or of `plan_decode`: the call is
            then local, as every rank has the rows of all tokens and writes the slots that it holds.
        k_local, v_local : tensors [>= num_local_rows, num_kv_heads, head_dim]
            Rows in the order of ``shard``; further rows are never read. Values may differ from
            keys in heads and dimensions.
        k_cache, v_cache : tensors [num_slots, num_kv_heads, head_dim], contiguous
            Or [num_pages, page_size, num_kv_heads, head_dim], or [num_slots, 1, num_kv_heads,
            head_dim], as KV pools have them with and without the FIA layout; same dtype as the
            rows. The call writes ``plan.slots`` only, and nothing on an error. With a placement,
            the caches are this rank's shards, and the call writes the slots that they hold.

        Raises
        ------
        TypeError
            If rows or caches are not on the CPU, or require a gradient in grad mode, or caches were
            made under ``torch.inference_mode()`` and the call is outside.
        ValueError
            If there are too few rows, values without a cache or a cache without values, the plan is
            of another rank, or caches are not contiguous, too small for the slots, or of another
            shape or dtype than the rows.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan or other
            rows, or does not answer.

        Notes
        -----
        In pools with `shared_memory`, each rank writes its own rows into the memory of its host.
        Rows of other hosts travel once: the k-th rank of a host receives and writes those of the
        k-th rank of every other host. Writing begins when every rank has entered the call, so no
        row overwrites keys that another rank still reads in an earlier call. The call returns when
        all rows are written, so every rank then sees the rows of all ranks.
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
