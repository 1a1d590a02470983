# SPDX-License-Identifier: Apache-2.0
"""Keys that sparse attention selects on each rank: in cpattn, in sglang's DSA layers, in others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import ints, shard_index
from .runs import requests_of


def from_topk(
    extend_lens: Sequence[int],
    prefix_lens: Sequence[int],
    rows: Sequence[tuple[Any, Any]],
    indices: Sequence[Any],
    *,
    topk: int,
    scores: Sequence[Any] | None = None,
    shards: int = 1,
    interleave: int = 1,
) -> dict[str, Any]:
    """Make a document of the keys that queries select, over all ranks.

    Parameters
    ----------
    extend_lens, prefix_lens : ints [bs]
        New and cached tokens of each sequence.
    rows : sequence of (ints [rows], ints [rows])
        For each rank, the request and the position of each of its queries, as in
        ``query_request_indices`` and ``query_cache_lengths - 1`` of metadata. Queries may be on
        several ranks if each selects among its own keys.
    indices : sequence of ints [rows, n]
        For each rank, the selection of its queries, -1 for none: positions within the sequence, as
        `cpattn.sparse.cp_indexer_topk` and sglang's indexer on Ascend return them, or, with
        ``shards``, places among the rank's keys of the sequence.
    topk : int
        Number of keys that a query selects, over all ranks.
    scores : sequence of float arrays [rows, keys], optional
        For each rank, the scores of all keys of a query's sequence; for a query on several ranks,
        one rank's scores suffice. Without scores only the number of keys is checked, not the
        choice.
    shards, interleave : int
        Number of ranks that share the keys, rank after rank, and consecutive tokens per rank.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If rows and indices differ in length.

    Examples
    --------
    >>> from cpattn_proof import lint
    >>> rows = [([0, 0], [0, 3]), ([0, 0], [1, 2])]
    >>> indices = [[[0, -1], [1, 3]], [[1, 0], [2, 1]]]
    >>> scores = [[[5, 7, 6, 8]] * 2] * 2
    >>> lint(from_topk([4], [0], rows, indices, topk=2, scores=scores)).proved
    True
    >>> indices[0][1] = [2, 3]
    >>> report = lint(from_topk([4], [0], rows, indices, topk=2, scores=scores))
    >>> report.findings[0].what
    'query 3 of request 0 selects key 2, whose score is 6, not key 1 with 7; so 1 of 2'
    """
    extend, prefix = ints(extend_lens), ints(prefix_lens)
    ranks: list[dict[str, Any]] = []
    scored: dict[tuple[int, int], list[float]] = {}
    for rank, ((request, position), chosen) in enumerate(zip(rows, indices, strict=True)):
        request, position = ints(request), ints(position)
        table = np.asarray(chosen, np.int64)
        if table.ndim != 2 or not len(request) == len(position) == len(table):
            raise NotUsable(
                f"from_topk: rank {rank} must have a line of indices for each of its rows, got "
                f"{len(request)}, {len(position)} and shape {list(table.shape)}"
            )
        row, place = np.nonzero(table >= 0)
        index = table[row, place]
        ranks.append({
            "selections": {
                "request": request[row].tolist(), "position": position[row].tolist(),
                "key": _keys(index, rank, shards, interleave).tolist(), "index": index.tolist(),
            }
        })  # fmt: skip
        for line in range(len(request)) if scores is not None else ():
            query = int(request[line]), int(position[line])
            visible = np.asarray(scores[rank][line], np.float64)[: query[1] + 1]  # type: ignore[index]
            scored.setdefault(query, visible.tolist())
    top: dict[str, Any] = {"k": topk}
    if scores is not None:
        top["scores"] = [
            {"request": request, "position": position, "scores": values}
            for (request, position), values in scored.items()
        ]
    return {
        "schema": SCHEMA,
        "requests": requests_of(extend, prefix),
        "cache": {"page_size": 1, "shards": shards, "interleave": interleave},
        "topk": top,
        "ranks": ranks,
    }


def _keys(index: Any, rank: int, shards: int, interleave: int) -> Any:
    """Return the positions of places on a rank."""
    if shards == 1:
        return index
    round_, within = np.divmod(index, interleave)
    keys = (round_ * shards + rank % shards) * interleave + within
    assert (shard_index(keys, shards, interleave) == index).all()
    return keys
