# SPDX-License-Identifier: Apache-2.0
"""A context-parallel plan as text: which rank owns which tokens, and how even the work is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .context_parallel import ContextParallelMetadata, build_cp_metadata_all_ranks

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_BAR_WIDTH = 80


def block_map(
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int] | None = None,
    *,
    cp_size: int,
    strategy: str = "zigzag",
) -> str:
    """Draw the plan of a batch.

    Parameters
    ----------
    extend_lens, prefix_lens : int, shape [bs]
        New tokens of each sequence, and how many are cached before them (default: none).
    cp_size : int
    strategy : str
        As for `build_cp_metadata`.

    Returns
    -------
    str
        For every sequence a bar of its new tokens, each marked with the rank that owns it
        (0-9, a-z, then +), and the runs of tokens; then one line per rank with its tokens,
        its visible (query, key) pairs, both also in relation to the mean over the ranks,
        and its rows after physical padding.

    Examples
    --------
    >>> print(block_map([5, 2], [0, 3], cp_size=2))
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
    rank   tokens               pairs          padded
       0        4  1.14x           12  1.00x        4
       1        3  0.86x           12  1.00x        4
    """
    extend = [int(n) for n in extend_lens]
    prefix = [0] * len(extend) if prefix_lens is None else [int(n) for n in prefix_lens]
    if len(prefix) != len(extend):
        raise ValueError(
            "block_map: prefix_lens must have as many elements as extend_lens, "
            f"got {len(prefix)} and {len(extend)}"
        )
    if min(prefix, default=0) < 0:
        raise ValueError(f"block_map: prefix_lens must be >= 0, got {min(prefix)}")
    plans = build_cp_metadata_all_ranks(
        extend,
        [p + n for p, n in zip(prefix, extend, strict=True)],
        cp_size=cp_size,
        strategy=strategy,
    )
    owners = np.empty(sum(extend), dtype=np.int64)
    for plan in plans:
        owners[plan.local_q_indices] = plan.cp_rank
    lines = [
        f"{plans[0].strategy} over {_count(cp_size, 'rank')}: {_count(len(extend), 'sequence')}, "
        f"{_count(sum(extend), 'new token')}",
        "",
    ]
    start = 0
    for s, (cached, length) in enumerate(zip(prefix, extend, strict=True)):
        lines.append(f"sequence {s}: {_count(length, 'new token')}, {cached} cached")
        lines.extend(f"  {line}" for line in _sequence_lines(owners[start : start + length]))
        start += length
    return "\n".join([*lines, "", *_rank_table(plans)])


def _sequence_lines(owners: np.ndarray) -> list[str]:
    """The bar of a sequence and the runs of tokens that each rank owns."""
    width = min(len(owners), _BAR_WIDTH)
    cells = owners[np.arange(width) * len(owners) // max(width, 1)]
    bar = "".join(_DIGITS[rank] if rank < len(_DIGITS) else "+" for rank in cells)
    begins = np.flatnonzero(np.diff(owners, prepend=-1))
    ends = np.append(begins[1:], len(owners))
    lines = [bar] if bar else []
    for rank in np.unique(owners):
        own = owners[begins] == rank
        spans = [_span(*span) for span in zip(begins[own][:4], ends[own][:4], strict=True)]
        if len(spans) == 4 and own.sum() > 4:
            spans[3] = "..."
        lines.append(f"rank {rank}: {' '.join(spans)}")
    return lines


def _span(begin: int, end: int) -> str:
    return f"{begin}" if end - begin == 1 else f"{begin}-{end - 1}"


def _rank_table(plans: list[ContextParallelMetadata]) -> list[str]:
    tokens = np.array([len(plan.local_q_indices) for plan in plans])
    pairs = np.array([plan.query_cache_lengths.sum(dtype=np.int64) for plan in plans])
    padded = plans[0].pad_to_physical().per_rank_actual_token
    lines = [f"rank{'tokens':>9}{'':7}{'pairs':>13}{'':7}{'padded':>9}"]
    for rank in range(len(plans)):
        lines.append(
            f"{rank:4}{tokens[rank]:9}{_share(tokens, rank)}{pairs[rank]:13}"
            f"{_share(pairs, rank)}{padded[rank]:9}"
        )
    return lines


def _share(values: np.ndarray, rank: int) -> str:
    mean = values.mean()
    return f"{values[rank] / mean if mean else 1:6.2f}x"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
