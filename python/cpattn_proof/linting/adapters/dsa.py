# SPDX-License-Identifier: Apache-2.0
"""Metadata of DSA layers with a line for each local row, as in sglang on Ascend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints
from .context_parallel import rows_apart
from .runs import requests_of, row_runs, tokens_of


def from_row_metadata(
    metadata: Sequence[Any],
    local_q_indices: Sequence[Any],
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    tables: Any,
    *,
    page_size: int,
) -> dict[str, Any]:
    """Make a document of the metadata of all ranks, with every row as a sequence of its own.

    Parameters
    ----------
    metadata : sequence of objects
        For each rank, ``block_tables`` [rows, pages] and ``actual_seq_lengths_kv`` [rows], as
        sglang's ``prepare_dsa_cp_metadata`` leaves them; padding rows come last.
    local_q_indices : sequence of ints
        New tokens of the batch that the rows of each rank are, without padding.
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each sequence.
    tables : ints [bs, pages]
        Pages of each sequence. The pages of a row identify the sequence whose keys it sees.
    page_size : int
        Tokens per page.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If a rank has fewer lines than rows, or the pages of a row belong to no sequence.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from cpattn_proof import lint
    >>> ranks = [
    ...     SimpleNamespace(block_tables=[[2], [2]], actual_seq_lengths_kv=[1, 3]),
    ...     SimpleNamespace(block_tables=[[2], [2]], actual_seq_lengths_kv=[2, 1]),
    ... ]
    >>> document = from_row_metadata(ranks, [[0, 2], [1]], [3], [0], [[2]], page_size=4)
    >>> lint(document).checked
    ('OWN', 'COV', 'LEN', 'PAD')
    """
    extend, prefix = ints(extend_lens), ints(prefix_lens)
    wanted = np.asarray(tables, np.int64)
    ranks = []
    for rank, (one, flat) in enumerate(zip(metadata, local_q_indices, strict=True)):
        owner, position = tokens_of(flat, extend, prefix)
        keys, lines = ints(one.actual_seq_lengths_kv), np.asarray(one.block_tables, np.int64)
        if not len(owner) <= len(keys) == len(lines):
            raise NotUsable(
                f"from_row_metadata: rank {rank} must have a line for each of its {len(owner)} "
                f"rows, got {len(keys)} lengths and {len(lines)} tables"
            )
        count = len(owner)
        request = _requests(rank, lines[:count], keys[:count], wanted, page_size)
        padding = len(keys) - count
        rows = row_runs(np.append(owner, [-1] * padding), np.append(position, np.arange(padding)))
        ranks.append({"rows": rows, "segments": rows_apart(request, keys[:count], 1)})
    return {
        "schema": SCHEMA,
        "requests": requests_of(extend, prefix),
        "cache": {"page_size": page_size, "tables": [_used(row) for row in wanted]},
        "ranks": ranks,
    }


def _used(row: Any) -> list[int]:
    """Return the pages up to the first entry that is none."""
    return [int(page) for page in row if page >= 0]


def _requests(rank: int, lines: Any, keys: Ints, tables: Any, page_size: int) -> Ints:
    """Return the request that owns each row's pages, as far as the row sees keys."""
    found = np.full(len(lines), -1, np.int64)
    for row, (line, count) in enumerate(zip(lines, -(-keys // page_size), strict=True)):
        same = np.zeros(len(tables), bool)
        if count <= min(tables.shape[1], len(line)):
            same = (tables[:, :count] == line[:count]).all(axis=1)
        if not same.any():
            raise NotUsable(
                f"from_row_metadata: row {row} of rank {rank} must have the pages of a sequence, "
                f"got {line[:count].tolist()}"
            )
        found[row] = np.flatnonzero(same)[0]
    return found
