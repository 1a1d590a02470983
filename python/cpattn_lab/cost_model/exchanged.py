# SPDX-License-Identifier: Apache-2.0
"""Work of one exchange: its value, and fields common to all exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpattn import _core

from .counts import BatchCounts, Mesh
from .layer import ITEM_BYTES, AttentionLayer, Ints
from .placement import pages_per_rank


@dataclass(frozen=True)
class ExchangeWork:
    """Work of each rank for one layer of one batch, as counted by `exchange_work`.

    Attributes
    ----------
    placement, exchange : str
        The arguments.
    num_hosts : int
        Number of hosts; each has consecutive ranks.
    tokens : array [cp_size], int64
        New tokens whose queries, keys and values the rank computes.
    pairs : array [cp_size], int64
        Query-key pairs in one of the query heads that the rank attends with.
    heads, kv_heads : arrays [cp_size], int64
        Heads that the rank attends with: all, except for ``"all_to_all"``.
    rows : array [cp_size], int64
        Rows of queries in one head, counted once per use.
    packed_keys : array [cp_size], float64
        Keys that items pack, summed over the rank's KV heads.
    longest_item : array [cp_size], float64
        Cost of the most expensive item, in products of a row with a key.
    calls : int
        Attention calls in a layer: one for each block of keys of a ring.
    mesh : (int, int) or None
        Rows and ranks per row, for ``"usp"``.
    parts : int
        Number of parts of exchange and attention that can overlap: KV heads of a rank, of the block
        of each host in a ring, or of each row of a mesh.
    sent_bytes, received_bytes : arrays [cp_size], int64
        Bytes between hosts, without digests.
    wire_bytes : array [3, num_hosts], int64
        Bytes that keep the wire of each host busy: with new rows to the ranks that keep them,
        before attention, and after attention. It is the larger of the bytes that its ranks send and
        receive. In a ring all hosts wait for the largest block at every step.
    swapped_bytes : array [num_hosts], int64
        Part of the bytes before attention that ``"usp"`` sends to the ranks of the heads before the
        ring begins; else 0.
    cached_bytes : array [num_hosts], int64
        Part of the bytes before attention that a gather of sharded pools sends for cached rows,
        which may come ahead by `ContextParallel.prefetch`; else 0.
    merged_rows : array [cp_size], int64
        Rows of partial results, each of one head, that the rank merges. 0 if it attends to all keys
        at once: no LSE is then needed.
    stored_bytes : array [cp_size], int64
        Bytes that the rank copies into the pool and its scratch, computed or received.
    pool_bytes : int
        Bytes of the batch's pages in the fullest pool of a rank, in all layers.
    scratch_bytes : int
        Most bytes that a rank needs beside the pool for one layer.
    ahead_bytes : int
        Extra scratch if cached rows of the next layer arrive meanwhile.

    Examples
    --------
    >>> from cpattn_lab.cost_model import exchange_work
    >>> work = exchange_work([8], [1032], cp_size=2, placement="page_interleave", exchange="pass_q")
    >>> work.pairs, work.sent_bytes        # 4 of 8 pages each, of which rank 0 keeps the ninth, too
    (array([4132, 4096]), array([ 98816, 115200]))
    """

    placement: str
    exchange: str
    num_hosts: int
    tokens: Ints
    pairs: Ints
    heads: Ints
    kv_heads: Ints
    rows: Ints
    packed_keys: NDArray[np.float64]
    longest_item: NDArray[np.float64]
    calls: int
    mesh: Mesh | None
    parts: int
    sent_bytes: Ints
    received_bytes: Ints
    wire_bytes: Ints
    swapped_bytes: Ints
    cached_bytes: Ints
    merged_rows: Ints
    stored_bytes: Ints
    pool_bytes: int
    scratch_bytes: int
    ahead_bytes: int


def bytes_of(layer: AttentionLayer) -> _core.LayerBytes:
    """Return the bytes of a token in one head of a layer."""
    item = ITEM_BYTES[layer.dtype]
    return _core.LayerBytes(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim * item,
        layer.kv_row_bytes // layer.num_kv_heads,
        layer.v_dim * item,
        layer.v_dim,
    )


def heads_of(num_heads: int, num_kv_heads: int, ranks: int) -> tuple[Ints, Ints]:
    """Return query heads and KV heads of each rank, [ranks]."""
    shares = _core.share_heads(num_heads, num_kv_heads, ranks)
    counts = [(share.num_heads, share.num_kv_heads) for share in shares]
    return tuple(np.array(counts, np.int64).T)


def along_rails(moved: Callable[..., tuple[Ints, ...]], *values: Ints) -> list[Ints]:
    """Return the bytes moved among the ranks of each column of [hosts, ranks of a host]."""
    rails = [moved(*columns) for columns in zip(*(x.T for x in values), strict=True)]
    return [np.stack(parts, axis=1) for parts in zip(*rails, strict=True)]


def exchanged(
    counts: BatchCounts,
    exchange: str,
    *,
    moved: list[tuple[Ints, Ints, Ints]],
    stored: Ints,
    pool_kv_heads: int | None = None,
    calls: int = 1,
    mesh: Mesh | None = None,
    swapped_bytes: Ints | None = None,
    cached_bytes: Ints | None = None,
    ahead_bytes: int = 0,
    **fields: Any,
) -> ExchangeWork:
    """Return the work of an exchange, with attention as in a gather unless `fields` differ."""
    own, layer, size = counts.own, counts.layer, counts.cp_size
    pages = int(pages_per_rank(counts.placement, counts.seq_lens, size, layer.page_size).max())
    if not counts.sharded:  # one pool for the ranks of a host
        pages = -(-pages // counts.ranks_per_host)
    page_bytes = layer.page_size * layer.kv_row_bytes * layer.num_layers
    if pool_kv_heads is not None:
        page_bytes = page_bytes // layer.num_kv_heads * pool_kv_heads
    new = counts.shards
    to_pools, into_pool = (
        counts.by_host(rows - new.kept_at_home)
        * (layer.kv_row_bytes if exchange != "gather" else 0)
        for rows in (own.tokens, new.arriving_rows)
    )
    moved = [(to_pools, into_pool, np.maximum(to_pools.sum(1), into_pool.sum(1))), *moved]
    wire = [busy for _, _, busy in moved]
    computed = {
        "pairs": own.pairs,
        "heads": np.full(size, layer.num_heads, np.int64),
        "kv_heads": np.full(size, layer.num_kv_heads, np.int64),
        "packed_keys": own.packed_keys * layer.num_kv_heads,
        "longest_item": own.longest_item,
        "merged_rows": 0 * own.tokens,
    }
    nothing = 0 * wire[0]
    return ExchangeWork(
        placement=counts.placement,
        exchange=exchange,
        num_hosts=counts.num_hosts,
        tokens=own.tokens,
        calls=calls,
        mesh=mesh,
        swapped_bytes=nothing if swapped_bytes is None else swapped_bytes,
        cached_bytes=nothing if cached_bytes is None else cached_bytes,
        sent_bytes=sum((sent for sent, _, _ in moved), start=np.int64(0)).ravel(),
        received_bytes=sum((received for _, received, _ in moved), start=np.int64(0)).ravel(),
        wire_bytes=np.stack([*wire, *[nothing] * (3 - len(wire))]),
        stored_bytes=stored.ravel(),
        pool_bytes=pages * page_bytes,
        ahead_bytes=ahead_bytes,
        **computed | fields,
    )
