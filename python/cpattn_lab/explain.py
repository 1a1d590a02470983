# SPDX-License-Identifier: Apache-2.0
"""A context-parallel plan as text: tokens of each rank, and balance of work."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from cpattn.context_parallel.metadata import ContextParallelMetadata, build_cp_metadata_all_ranks

from .limits import check_seq_lens

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MIN_WIDTH = 20
_LEGEND = (
    "pairs: query tokens times the keys that they see; x: times the mean over the ranks; padded: "
    "rows of a rank when all ranks are padded to the same number of rows"
)


def block_map(
    extend_lens: Sequence[int],
    seq_lens: Sequence[int] | None = None,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    width: int = 80,
) -> str:
    """Draw the plan of a batch.

    Parameters
    ----------
    extend_lens : ints [bs]
        New tokens of each sequence.
    seq_lens : ints [bs], optional
        Cached prefix plus new tokens. Default: no prefix.
    cp_size : int
        Number of ranks.
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias, as for `build_cp_metadata`.
    width : int
        Most columns of the text, at least 20. A bar with fewer columns than tokens is scaled; the
        table of the ranks is as wide as its numbers.

    Returns
    -------
    str
        For every sequence a bar of its new tokens, each marked with its rank (0-9, a-z, then +),
        and the runs of tokens; then one line per rank with its tokens and its visible (query, key)
        pairs, both also relative to the mean over the ranks, and its rows after physical padding.

    Raises
    ------
    TypeError
        If `width` is no int.
    ValueError
        If `width` is below 20, lengths do not match, a sequence is shorter than its new tokens, or
        the strategy is unknown.

    Examples
    --------
    >>> print(block_map([5, 2], [5, 5], cp_size=2))
    zigzag over 2 ranks: 2 sequences, 7 new tokens
    <BLANKLINE>
    sequence 0: 5 new tokens, 0 cached
      00110
      rank 0: 0-1 4
      rank 1: 2-3
    sequence 1: 2 new tokens, 3 cached
      01
      rank 0: 0
      rank 1: 1
    <BLANKLINE>
    rank  tokens         pairs         padded
       0       4  1.14x     12  1.00x       4
       1       3  0.86x     12  1.00x       4
    <BLANKLINE>
    pairs: query tokens times the keys that they see; x: times the mean over the
    ranks; padded: rows of a rank when all ranks are padded to the same number of
    rows
    """
    if isinstance(width, bool) or not isinstance(width, int):
        raise TypeError(f"block_map: width must be an int, got {width!r}")
    if width < MIN_WIDTH:
        raise ValueError(f"block_map: width must be >= {MIN_WIDTH}, got {width}")
    extend = [int(n) for n in extend_lens]
    seq = extend if seq_lens is None else [int(n) for n in seq_lens]
    check_seq_lens("block_map", seq, extend)
    plans = build_cp_metadata_all_ranks(extend, seq, cp_size=cp_size, strategy=strategy)
    owners = np.empty(sum(extend), dtype=np.int64)
    for plan in plans:
        owners[plan.local_q_indices] = plan.cp_rank
    lines = textwrap.wrap(
        f"{plans[0].strategy} over {_count(cp_size, 'rank')}: {_count(len(extend), 'sequence')}, "
        f"{_count(sum(extend), 'new token')}",
        width,
    )
    lines.append("")
    start = 0
    for s, (total, length) in enumerate(zip(seq, extend, strict=True)):
        title = f"sequence {s}: {_count(length, 'new token')}, {total - length} cached"
        lines += textwrap.wrap(title, width)
        lines.extend(_sequence_lines(owners[start : start + length], width))
        start += length
    legend = _LEGEND
    if cp_size > 10:
        last = _DIGITS[min(cp_size, len(_DIGITS)) - 1]
        legend = f"ranks in bars: 0-9, a-{last}{', then +' * (cp_size > len(_DIGITS))}; {legend}"
    lines += ["", *_rank_table(plans), "", *textwrap.wrap(legend, width)]
    return "\n".join(lines)


def _sequence_lines(owners: np.ndarray, width: int) -> list[str]:
    """Return the bar of a sequence and each rank's runs of tokens, indented."""
    indent = "  "
    num_cells = min(len(owners), width - len(indent))
    cells = owners[np.arange(num_cells) * len(owners) // max(num_cells, 1)]
    bar = "".join(_DIGITS[rank] if rank < len(_DIGITS) else "+" for rank in cells)
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    ends = np.append(begins[1:], len(owners))
    lines = [indent + bar] if bar else []
    by_rank = np.argsort(owners[begins], kind="stable")
    ranks, first, counts = np.unique(owners[begins][by_rank], return_index=True, return_counts=True)
    for rank, start, count in zip(ranks, first, counts, strict=True):
        own = by_rank[start : start + min(count, 4)]
        spans = [_span(*span) for span in zip(begins[own], ends[own], strict=True)]
        if count > 4:
            spans[3] = "..."
        runs = f"rank {rank}: {' '.join(spans)}"
        lines += textwrap.wrap(
            runs, width, initial_indent=indent, subsequent_indent=2 * indent, break_on_hyphens=False
        )
    return lines


def _span(begin: int, end: int) -> str:
    return f"{begin}" if end - begin == 1 else f"{begin}-{end - 1}"


def _rank_table(plans: list[ContextParallelMetadata]) -> list[str]:
    tokens = np.array([len(plan.local_q_indices) for plan in plans])
    pairs = np.array([plan.query_cache_lengths.sum(dtype=np.int64) for plan in plans])
    columns = [
        ["rank", *map(str, range(len(plans)))],
        ["tokens", *map(str, tokens)],
        ["", *_shares(tokens)],
        ["pairs", *map(str, pairs)],
        ["", *_shares(pairs)],
        ["padded", *map(str, plans[0].pad_to_physical().per_rank_actual_token)],
    ]
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]


def _shares(values: np.ndarray) -> list[str]:
    """Return the values relative to their mean, as text."""
    mean = values.mean()
    return [f"{value / mean if mean else 1:.2f}x" for value in values]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
