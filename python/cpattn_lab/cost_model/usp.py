# SPDX-License-Identifier: Apache-2.0
"""USP, an exchange of two levels: heads within a row of a mesh of ranks, a ring between rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cpattn import _core
from cpattn.context_parallel.exchanges import LSE_BYTES

from .counts import BatchCounts, Mesh
from .exchanged import ExchangeWork, along_rails, bytes_of, exchanged, heads_of
from .layer import Ints
from .work import work_of_plans


def by_mesh(counts: BatchCounts, mesh: Mesh) -> ExchangeWork:
    """Count an exchange by heads among ranks of a row, then of keys round the rows.

    Arrays are [rows of the mesh, ranks of a row].
    """
    layer, (ring, columns) = counts.layer, mesh
    moving = bytes_of(layer)
    heads, kv_heads = heads_of(layer.num_heads, layer.num_kv_heads, columns)
    query, key, result = moving.query, moving.key, moving.output + LSE_BYTES
    tokens, keys = (x.reshape(mesh) for x in (counts.own.tokens, counts.shards.seen_rows))
    of_row, keys_of_row = tokens.sum(1, keepdims=True), keys.sum(1, keepdims=True)
    sent, received, returned, back = (
        part.T
        for part in along_rails(
            lambda queries, rows: _core.send_by_heads(
                queries, rows, moving, heads, kv_heads, result
            ),
            tokens.T,
            keys.T,
        )
    )
    blocks = keys_of_row * kv_heads * key
    passed_on, arriving = along_rails(lambda rows: _core.send_rows(rows, 1, True), blocks)
    swapped = np.maximum(sent, received).ravel()
    wire = swapped + (ring - 1) * blocks.max()  # all wait for the largest
    used = np.broadcast_to(heads > 0, mesh)
    packed, longest = _attended(counts, mesh)
    return exchanged(
        counts,
        "usp",
        pairs=_of_rows(counts.own.pairs, mesh),
        heads=np.tile(heads, ring),
        kv_heads=np.tile(kv_heads, ring),
        rows=np.where(used, of_row * ring, 0).ravel(),
        packed_keys=packed * np.tile(kv_heads, ring),
        longest_item=longest,
        calls=ring,
        parts=ring * int(kv_heads.max()),
        mesh=mesh,
        merged_rows=(of_row * heads * (ring if ring > 1 else 0)).ravel(),
        moved=[
            (_by_rank(sent + passed_on), _by_rank(received + arriving), wire),
            (_by_rank(returned), _by_rank(back), np.maximum(returned, back).ravel()),
        ],
        swapped_bytes=swapped,
        stored=_by_rank(counts.shards.arriving_rows * layer.kv_row_bytes) + _by_rank(blocks),
        scratch_bytes=int((2 * blocks + of_row * heads * (query + result * (1 + ring))).max()),
    )


def _by_rank(values: Ints) -> Ints:
    """Return values in the shape [hosts, 1], with one rank per host."""
    return values.reshape(-1, 1)


def _of_rows(values: Any, mesh: Mesh) -> Any:
    """Return [cp_size]: the sum over each rank's row of the mesh."""
    return np.repeat(values.reshape(mesh).sum(1), mesh[1])


def _attended(counts: BatchCounts, mesh: Mesh) -> tuple[Any, Any]:
    """Return [cp_size]: packed keys of a KV head, and the longest item, of the rank's row."""
    columns = mesh[1]
    heads, kv_heads = heads_of(counts.layer.num_heads, counts.layer.num_kv_heads, columns)
    most_kv_heads = int(kv_heads.max())
    group = -(-int(heads.max()) // most_kv_heads)
    layer = replace(counts.layer, num_heads=most_kv_heads * group, num_kv_heads=most_kv_heads)
    attended = work_of_plans(counts.plans, layer)
    longest = attended.longest_item.reshape(mesh).max(1)
    return _of_rows(attended.packed_keys, mesh), np.repeat(longest, columns)
