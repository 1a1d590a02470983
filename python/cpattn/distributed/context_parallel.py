# SPDX-License-Identifier: Apache-2.0
"""The calls of an engine: plan, shard, write_kv, attend, gather."""

from __future__ import annotations

from math import prod
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from .._arguments import flag
from ..context_parallel.attention import do_cp_attn_fia
from ..context_parallel.metadata import build_cp_metadata
from .exchange import RowExchange
from .plan import ContextParallelPlan, make_plan


class ContextParallel:
    """Context-parallel attention over the ranks of a given process group.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        A group of this process, of any backend that moves CPU tensors between two ranks. Its size
        is cp_size; its timeout bounds every wait.
    strategy : {"zigzag", "interleave", "contiguous"} or an alias
        Which tokens each rank has, as in `build_cp_metadata`; `plan` refuses unknown ones.
    page_size : int
        Token slots per page of the KV pools, at least 1.

    Attributes
    ----------
    group, strategy, page_size
        As given.
    cp_rank, cp_size : int
        The rank of this process within the group, and the number of ranks.

    Raises
    ------
    TypeError
        If `group` is no ProcessGroup, or `page_size` no integer.
    ValueError
        If `page_size` is below 1.

    Notes
    -----
    Any lengths give the exact result. Requests shorter than 2 * cp_size leave blocks empty, up to
    ranks without a row; whether that pays is for ``can_apply_cp`` to say, and is not asked here.

    Rows travel point to point and land where they are read, so uneven and empty shares need no
    padding, and as bytes, so every dtype does. Over gloo, 16 MiB per rank take a third of the time
    of an all-gather.

    A rank that does not answer within the group's timeout, or is gone, is a RuntimeError that names
    it; the group cannot be used any more. A rank that makes another call, or the same one with
    another plan or other rows, or whose arguments are refused, is a RuntimeError on every rank
    before any row is sent, but for the rank that refuses them, which has its own error; the group
    stays usable. Ranks in messages are ranks of the group.

    Use from one thread at a time. The receive buffer is kept for the next call.

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
        self, group: dist.ProcessGroup, *, strategy: str = "zigzag", page_size: int
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"ContextParallel: group must be a ProcessGroup, got {group!r}")
        if index(page_size) < 1:
            raise ValueError(f"ContextParallel: page_size must be positive, got {page_size}")
        self.group = group
        self.strategy = strategy
        self.page_size = page_size
        self._exchange = RowExchange(group)
        self.cp_rank = self._exchange.rank
        self.cp_size = self._exchange.size

    def plan(
        self,
        extend_lens: Any,
        seq_lens: Any = None,
        *,
        block_tables: Any,
        out_cache_loc: Any = None,
        num_tokens: int | None = None,
        pad_to_physical: bool = False,
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

        Returns
        -------
        ContextParallelPlan
            Of this rank; for all layers.

        Raises
        ------
        TypeError
            For lengths, tables, slots or a number that are no integers, and a flag that is no bool.
        ValueError
            For an unknown strategy, lengths that do not match, negative page ids, tables that are
            too narrow, tokens that share a slot, and slots other than those of the tables.
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
        )
        return make_plan(
            metadata,
            extend_lens,
            block_tables=block_tables,
            out_cache_loc=out_cache_loc,
            page_size=self.page_size,
            pad_to_physical=flag(pad_to_physical, "ContextParallel.plan", "pad_to_physical"),
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
        self._check_plan("shard", plan)
        return plan.metadata.shard(x, dim)

    def write_kv(
        self,
        plan: ContextParallelPlan,
        k_local: torch.Tensor,
        v_local: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        """Exchange the keys and values of the new tokens once; write all into this rank's pool.

        Parameters
        ----------
        plan : ContextParallelPlan
            Of this object's `plan`, for the same batch on every rank.
        k_local, v_local : tensors [>= num_local_rows, num_kv_heads, head_dim]
            In the order of ``shard``; further rows are never read. Heads and dimensions of values
            may differ from those of keys.
        k_cache, v_cache : tensors [num_slots, num_kv_heads, head_dim], contiguous
            Or [num_pages, page_size, num_kv_heads, head_dim], or [num_slots, 1, num_kv_heads,
            head_dim], as KV pools have them with and without the FIA layout; of the dtype of the
            rows. Written at ``plan.slots`` and nowhere else; not at all on an error.

        Raises
        ------
        TypeError
            For rows that are not on the CPU.
        ValueError
            For too few rows, a plan of another rank, and caches of other shapes or dtypes than the
            rows, that are not contiguous, or that are too small for the slots.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan or other
            rows, or does not answer.
        """
        with self._exchange.agreement("write_kv", plan.terms) as parts:
            self._check_plan("write_kv", plan)
            parts.append(_local_rows("write_kv", plan, "k_local", k_local))
            parts.append(_local_rows("write_kv", plan, "v_local", v_local))
            k_pool = _pool_rows(plan, "k_cache", k_cache, k_local)
            v_pool = _pool_rows(plan, "v_cache", v_cache, v_local)
        k_rows, v_rows = self._exchange.all_rows("write_kv", plan.rows_per_rank, parts)
        slots = torch.tensor(plan.slots)
        written = slots >= 0
        slots, rows = slots[written], plan.gathered_rows[written]
        k_pool.index_copy_(0, slots, k_rows.index_select(0, rows))
        v_pool.index_copy_(0, slots, v_rows.index_select(0, rows))

    def attend(
        self,
        plan: ContextParallelPlan,
        q_local: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        scale: float | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Causal attention of this rank's rows over cached prefixes and new tokens. Local.

        Parameters
        ----------
        plan : ContextParallelPlan
            Of this object's `plan`.
        q_local : tensor [>= num_local_rows, num_heads, head_dim], float32, float16 or bfloat16
            In the order of ``shard``; further rows are never read.
        k_cache, v_cache : tensors of the dtype of q_local
            As for ``write_kv``, which comes first.
        scale : float, default 1/sqrt(head_dim)
            Must be given for head_dim > 256.
        out : tensor [num_rows, num_heads, v_head_dim] of the dtype of q_local, optional
            Written, each row contiguous; the result is a view of it.
        return_lse : bool
            Whether to return `lse`, too.

        Returns
        -------
        out : tensor [num_rows, num_heads, v_head_dim], of the dtype of q_local
            For all rows of q_local; zeros in the further ones.
        lse : tensor [num_rows, num_heads], float32; only with ``return_lse``
            Natural logarithm; -inf in the further rows.

        Raises
        ------
        TypeError
            For a scale that is no number, and a flag that is no bool.
        ValueError
            For fewer rows than this rank has, page ids beyond the caches, and shapes or dtypes
            that do not fit.
        """
        if q_local.ndim != 3:
            raise ValueError(
                "ContextParallel.attend: q_local must be [num_rows, num_heads, head_dim], "
                f"got shape {list(q_local.shape)}"
            )
        if out is not None and (out.ndim != 3 or not out[0:1].is_contiguous()):
            raise ValueError(
                "ContextParallel.attend: out must be [num_rows, num_heads, v_head_dim] with "
                f"contiguous rows, got shape {list(out.shape)}, strides {list(out.stride())}"
            )
        result: Any = do_cp_attn_fia(
            q_local.flatten(1),
            k_cache,
            v_cache,
            plan.metadata,
            block_tables=plan.block_tables,
            page_size=plan.page_size,
            num_heads=q_local.shape[1],
            num_kv_heads=k_cache.shape[-2],
            scale=scale,
            out=None if out is None else out.view(len(out), out.shape[1] * out.shape[2]),
            return_lse=return_lse,
        )
        shape = (*q_local.shape[:2], v_cache.shape[-1])
        if return_lse:
            return result[0].view(shape), result[1]
        return result.view(shape)

    def gather(
        self, plan: ContextParallelPlan, x_local: torch.Tensor, dim: int = 0
    ) -> torch.Tensor:
        """Exchange the rows of all ranks and put them into token order: the inverse of ``shard``.

        Parameters
        ----------
        plan : ContextParallelPlan
            Of this object's `plan`, for the same batch on every rank.
        x_local : tensor with at least num_local_rows rows along `dim`, of any dtype
            In the order of ``shard``; further rows are never read.
        dim : int
            The token dimension.

        Returns
        -------
        x : tensor with num_tokens rows along `dim`, contiguous
            A new one, the same on every rank.

        Raises
        ------
        TypeError
            For rows that are not on the CPU.
        ValueError
            For too few rows, and a plan of another rank.
        RuntimeError
            If another rank refuses its arguments, makes another call, has another plan or other
            rows, or does not answer.
        """
        with self._exchange.agreement("gather", plan.terms) as parts:
            self._check_plan("gather", plan)
            x = x_local.movedim(dim, 0)
            parts.append(_local_rows("gather", plan, "x_local", x))
        (rows,) = self._exchange.all_rows("gather", plan.rows_per_rank, parts)
        tokens = rows.index_select(0, plan.gathered_rows)
        return tokens.view(plan.num_tokens, *x.shape[1:]).movedim(0, dim).contiguous()

    def _check_plan(self, call: str, plan: ContextParallelPlan) -> None:
        if not isinstance(plan, ContextParallelPlan):
            raise TypeError(
                f"ContextParallel.{call}: plan must be one of ContextParallel.plan, got "
                f"{type(plan).__name__}"
            )
        of = (plan.cp_rank, len(plan.rows_per_rank))
        if of != (self.cp_rank, self.cp_size):
            raise ValueError(
                f"ContextParallel.{call}: plan must be of rank {self.cp_rank} of {self.cp_size}, "
                f"got rank {of[0]} of {of[1]}"
            )


def _local_rows(call: str, plan: ContextParallelPlan, name: str, x: torch.Tensor) -> torch.Tensor:
    """x without rows of physical padding, as [num_local_rows, width]."""
    if x.device.type != "cpu":
        raise TypeError(f"ContextParallel.{call}: {name} must be on the CPU, got {x.device}")
    if len(x) < plan.num_local_rows:
        raise ValueError(
            f"ContextParallel.{call}: {name} must have at least the {plan.num_local_rows} rows of "
            f"rank {plan.cp_rank}, got {len(x)}"
        )
    return x[: plan.num_local_rows].reshape(plan.num_local_rows, prod(x.shape[1:]))


def _pool_rows(
    plan: ContextParallelPlan, name: str, cache: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """The cache as [num_slots, width], after checking it against the rows to be written."""
    paged = cache.ndim == 4 and cache.shape[1] in (1, plan.page_size)
    if local.ndim != 3 or not (cache.ndim == 3 or paged) or cache.shape[-2:] != local.shape[1:]:
        raise ValueError(
            f"ContextParallel.write_kv: {name} must be [num_slots, num_kv_heads, head_dim] or "
            f"[num_pages, {plan.page_size}, num_kv_heads, head_dim] for rows "
            f"[num_rows, num_kv_heads, head_dim], got {list(cache.shape)} for {list(local.shape)}"
        )
    if cache.dtype != local.dtype or not cache.is_contiguous():
        raise ValueError(
            f"ContextParallel.write_kv: {name} must be contiguous {local.dtype}, "
            f"got {cache.dtype} of strides {list(cache.stride())}"
        )
    pool = cache.view(-1, prod(cache.shape[-2:]))
    if plan.num_tokens and plan.slots.max() >= len(pool):
        i = int(plan.slots.argmax())
        raise ValueError(
            f"ContextParallel.write_kv: slots must be below the {len(pool)} rows of {name}, "
            f"got slots[{i}] = {plan.slots[i]}"
        )
    return pool
