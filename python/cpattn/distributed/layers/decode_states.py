# SPDX-License-Identifier: Apache-2.0
"""Partial results of a decode step, on their way from the ranks of the keys to those of the heads.

By "gather" every rank receives those of all ranks, and merges all heads. By "all_to_all" a rank
receives those of its own heads and merges these alone, as in Helix; where every rank is to have all
heads, the merged ones go to all. With N ranks these are 2 (N - 1) / N partial results for each
rank in place of N - 1, in two rounds in place of one. Both merge each row of a head in rank order,
so they have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import _core
from ..transport.exchange import RowExchange
from .partials import State, merged, merged_columns

STATE_EXCHANGES = ("gather", "all_to_all")
OUT_HEADS = ("all", "own")


def heads_of_ranks(num_heads: int, size: int) -> list[slice]:
    """The query heads of each rank, as even as can be: no rank has a group of KV heads here."""
    return [share.q for share in _core.share_heads(num_heads, num_heads, size)]


def gather_queries(exchange: RowExchange, q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The queries of all heads, of ranks that have some of them each."""
    if not len(q):
        return q.new_empty(0, num_heads, q.shape[2])
    counts = _counts(heads_of_ranks(num_heads, exchange.size))
    (rows,) = exchange.all_rows("decode", counts, [_heads_first(q)])
    return _tokens_first(rows, len(q), q.shape[2])


def merge_states(
    exchange: RowExchange, state: State, sinks: torch.Tensor | None, name: str, out_heads: str
) -> State:
    """The result of all ranks' partial ones: of all heads, or of those of this rank."""
    out, lse = state
    if name == "all_to_all" and len(out):  # rows of heads have no bytes without tokens
        return _by_heads(exchange, out, lse, sinks, out_heads)
    num_rows = [len(out)] * exchange.size
    outs, lses = exchange.all_rows("decode", num_rows, [out.flatten(1), lse])
    out, lse = merged_columns(outs, lses, exchange.size, sinks)
    if out_heads == "all":
        return State(out, lse)
    own = heads_of_ranks(lse.shape[1], exchange.size)[exchange.rank]
    return State(out[:, own].contiguous(), lse[:, own].contiguous())


def _by_heads(
    exchange: RowExchange,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out_heads: str,
) -> State:
    """Rows travel as heads, each with all tokens, for every rank takes some of the heads."""
    num_tokens, num_heads, v_head_dim = out.shape
    heads = heads_of_ranks(num_heads, exchange.size)
    own = heads[exchange.rank]
    parts = (exchange.size, own.stop - own.start)
    outs, lses = exchange.routed_rows(
        "decode",
        [_heads_first(out), _heads_first(lse)],
        [torch.arange(share.start, share.stop) for share in heads],
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
    """[num_tokens, num_heads, ..] as a row for each head."""
    return x.transpose(0, 1).flatten(1)


def _tokens_first(rows: torch.Tensor, num_tokens: int, dim: int) -> torch.Tensor:
    """The inverse, as a new tensor."""
    heads_first = rows.reshape(len(rows), num_tokens, dim)
    return heads_first.transpose(0, 1).clone(memory_format=torch.contiguous_format)
