# SPDX-License-Identifier: Apache-2.0
"""Partial results of a decode step: exchange from the ranks of the keys to those of the heads.

With "gather" every rank receives the partial results of all ranks and merges all heads. With
"all_to_all" a rank receives and merges only its own heads, as in Helix; if every rank needs all
heads, the ranks then exchange merged heads. With N ranks, a rank receives 2 (N - 1) / N partial
results in two rounds, instead of N - 1 in one. If all ranks share the memory of one host, nothing
is sent: each rank writes its partial results into scratch of the host, and merges those of all.
Each row of a head merges in rank order, so all ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ... import _core
from ..transport.exchange import RowExchange
from ..transport.host import HostGroup
from ..transport.shared_memory import shared_scratch
from .partials import State, merged, merged_columns

_LINE = 64  # bytes of a cache line
STATE_EXCHANGES = ("gather", "all_to_all")
OUT_HEADS = ("all", "own")


def heads_of_ranks(num_heads: int, size: int) -> list[slice]:
    """Return the query heads of each rank, as even as possible, even within a KV head's group."""
    return [share.q for share in _core.share_heads(num_heads, num_heads, size)]


def gather_queries(exchange: RowExchange, q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Gather the queries of all heads from ranks that have some heads each."""
    if not len(q):
        return q.new_empty(0, num_heads, q.shape[2])
    counts = _counts(heads_of_ranks(num_heads, exchange.size))
    (rows,) = exchange.all_rows("decode", counts, [_heads_first(q)])
    return _tokens_first(rows, len(q), q.shape[2])


def merge_states(
    exchange: RowExchange, state: State, sinks: torch.Tensor | None, name: str, out_heads: str
) -> State:
    """Merge the partial results of all ranks, for all heads or for those of this rank."""
    out, lse = state
    host = exchange.host()
    if isinstance(host, HostGroup) and not host.rails.others and len(out):
        return _in_shared_memory(exchange, host, state, sinks, out_heads)
    if name == "all_to_all" and len(out):  # without tokens, rows of heads have no bytes
        return _by_heads(exchange, out, lse, sinks, out_heads)
    num_rows = [len(out)] * exchange.size
    outs, lses = exchange.all_rows("decode", num_rows, [out.flatten(1), lse])
    out, lse = merged_columns(outs, lses, exchange.size, sinks)
    if out_heads == "all":
        return State(out, lse)
    own = heads_of_ranks(lse.shape[1], exchange.size)[exchange.rank]
    return State(out[:, own].contiguous(), lse[:, own].contiguous())


def _in_shared_memory(
    exchange: RowExchange,
    host: HostGroup,
    state: State,
    sinks: torch.Tensor | None,
    out_heads: str,
) -> State:
    """Merge the partial results that all ranks write into scratch of their host."""
    ends = list(accumulate(-(-part.nbytes // _LINE) * _LINE for part in state))
    scratch = shared_scratch(exchange, host, exchange.size * ends[-1])[0]
    of_ranks = scratch[: exchange.size * ends[-1]].view(exchange.size, ends[-1])
    parts = []
    for part, begin in zip(state, (0, *ends), strict=False):
        columns = of_ranks[:, begin : begin + part.nbytes].view(part.dtype)
        parts.append(columns.unflatten(1, part.shape))
        parts[-1][exchange.rank] = part
    exchange.meet_host("decode")  # the next call meets before it writes
    if out_heads == "own":
        own = heads_of_ranks(state.lse.shape[1], exchange.size)[exchange.rank]
        parts = [part[:, :, own] for part in parts]
        sinks = None if sinks is None else sinks[own]
    return merged(list(map(State, *parts)), sinks)


def _by_heads(
    exchange: RowExchange,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out_heads: str,
) -> State:
    """Exchange rows that are heads with all tokens, as every rank takes some of the heads."""
    num_tokens, num_heads, v_head_dim = out.shape
    heads = heads_of_ranks(num_heads, exchange.size)
    own = heads[exchange.rank]
    parts = (exchange.size, own.stop - own.start)
    outs, lses = exchange.routed_rows(
        "decode",
        [_heads_first(out), _heads_first(lse)],
        [torch.arange(share.start, share.stop, device="cpu") for share in heads],
        [parts[1]] * exchange.size,
    )
    of_ranks = outs.unflatten(0, parts).unflatten(2, (num_tokens, v_head_dim)).transpose(1, 2)
    lses = lses.unflatten(0, parts).transpose(1, 2)
    own_sinks = None if sinks is None else sinks[own]
    out, lse = merged(list(map(State, of_ranks, lses)), own_sinks)
    if out_heads != "all":
        return State(out, lse)
    rows = [_heads_first(out), _heads_first(lse).contiguous()]
    out, lse = exchange.all_rows("decode", _counts(heads), rows)
    of_tokens = lse.T.clone(memory_format=torch.contiguous_format)
    return State(_tokens_first(out, num_tokens, v_head_dim), of_tokens)


def _counts(heads: Sequence[slice]) -> list[int]:
    return [share.stop - share.start for share in heads]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, num_heads, ..] as a row for each head."""
    return x.transpose(0, 1).flatten(1)


def _tokens_first(rows: torch.Tensor, num_tokens: int, dim: int) -> torch.Tensor:
    """Undo `_heads_first`, into a new tensor."""
    heads_first = rows.reshape(len(rows), num_tokens, dim)
    return heads_first.transpose(0, 1).clone(memory_format=torch.contiguous_format)
