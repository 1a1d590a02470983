# SPDX-License-Identifier: Apache-2.0
"""Decode context parallelism (DCP): lengths and block tables of all ranks, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..document import SCHEMA
from ..intervals import ints


def from_local_lens(
    seq_lens: Sequence[int],
    local_seq_lens: Sequence[Sequence[int]],
    block_tables: Sequence[Any] | None = None,
    *,
    block_size: int,
    interleave: int = 1,
    query_lens: Sequence[int] | None = None,
    row_lens: Sequence[Sequence[int]] | None = None,
    num_blocks: int | None = None,
) -> dict[str, Any]:
    """Make a document of a decode step with keys sharded over ranks.

    Parameters
    ----------
    seq_lens : ints [bs]
        Tokens of each sequence, the new ones included.
    local_seq_lens : sequence of ints [bs]
        Number of each sequence's tokens on each rank (``dcp_local_seq_lens``).
    block_tables : sequence of ints [bs, blocks], optional
        Local blocks of each rank; entries beyond a sequence's need are ignored.
    block_size, interleave : int
        Tokens per block, and consecutive tokens per rank (``cp_kv_cache_interleave_size``).
    query_lens : ints [bs], optional
        New tokens of each sequence; default 1. Attention is checked if each has one, or with
        `row_lens`.
    row_lens : sequence of ints [sum of query_lens] or [bs, steps], optional
        Number of each rank's keys visible to each new token, sequence after sequence, as in masks
        of several new tokens; default: the local lengths, if each sequence has one new token.
        Correct are ``TokenInterleave.local_lens`` of `cpattn.kv` of positions + 1.
    num_blocks : int, optional
        Blocks of a rank's cache; without it, bounds of blocks are not checked.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If numbers of requests or ranks differ; raised by the linter.

    Examples
    --------
    >>> from cpattn_proof import lint
    >>> lint(from_local_lens([7], [[4], [3]], block_size=16)).proved
    True
    >>> lint(from_local_lens([7], [[7], [7]], block_size=16)).findings[0].invariant
    'COV'
    """
    lengths = ints(seq_lens)
    queries = np.ones_like(lengths) if query_lens is None else ints(query_lens)
    rows = {
        "request": list(range(len(lengths))),
        "position": (lengths - queries).tolist(),
        "count": queries.tolist(),
    }
    ranks = []
    for rank, counts in enumerate(local_seq_lens):
        part: dict[str, Any] = {"rows": rows, "key_lens": ints(counts).tolist()}
        if row_lens is not None or (queries == 1).all():
            keys = ints(counts if row_lens is None else row_lens[rank]).tolist()
            part["segments"] = {
                "request": np.repeat(np.arange(len(queries)), queries).tolist(),
                "row": list(range(len(keys))), "rows": [1] * len(keys), "keys": keys,
            }  # fmt: skip
        if block_tables is not None:
            part["tables"] = np.asarray(block_tables[rank]).tolist()
        ranks.append(part)
    cache = {"page_size": block_size, "shards": len(ranks), "interleave": interleave}
    return {
        "schema": SCHEMA,
        "requests": [
            {"prefix": int(length - new), "extend": int(new)}
            for length, new in zip(lengths, queries, strict=True)
        ],
        "queries": "all",
        "cache": cache | ({} if num_blocks is None else {"num_pages": num_blocks}),
        "ranks": ranks,
    }
