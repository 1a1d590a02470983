# SPDX-License-Identifier: Apache-2.0
"""What each rank computes, sends and keeps by each way to exchange: integers, exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .counts import BatchCounts, check_placing
from .placement import pages_per_rank
from .work import ITEM_BYTES, AttentionLayer, Ints

LSE_BYTES = 4  # float32, of each token and head


@dataclass(frozen=True)
class ExchangeWork:
    """The work of each rank for one layer of one batch, as `exchange_work` counts it.

    Attributes
    ----------
    placement, exchange : str
        As given.
    num_hosts : int
        Hosts; ranks r and r + 1 are of the same one unless a multiple of the ranks of a host lies
        between them.
    tokens : array [cp_size], int64
        New tokens that the rank computes queries, keys and values of.
    pairs : array [cp_size], int64
        Query-key pairs in one of the query heads that the rank attends with.
    heads, kv_heads : arrays [cp_size], int64
        That the rank attends with: all, but for ``"all_to_all"``.
    rows : array [cp_size], int64
        Rows of queries in one head, each as often as it is attended with.
    packed_keys : array [cp_size], float64
        Keys that items pack, summed over the rank's KV heads.
    longest_item : array [cp_size], float64
        The most expensive item, in products of a row with a key.
    calls : int
        Of attention in a layer: one for each block of keys of a ring.
    parts : int
        Into which exchange and attention can be cut to run side by side: blocks of hosts, or KV
        heads of a rank.
    sent_bytes, received_bytes : arrays [cp_size], int64
        Between hosts, without the digests that ranks compare before.
    wire_bytes : array [3, num_hosts], int64
        For which the wire of each host is busy with new rows that go to the ranks that keep them,
        then before attention, and after it: the larger of what its ranks send and receive. In a
        ring all hosts wait for the largest block at every step.
    stored_bytes : array [cp_size], int64
        That the rank copies into the pool, and into its scratch, from what it computed or received.
    pool_bytes : int
        Pages of the batch in the pool of a rank, in all layers; of the rank that has most.
    scratch_bytes : int
        That a rank needs beside the pool for one layer; of the rank that needs most.

    Examples
    --------
    >>> from cpattn.cost_model import exchange_work
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
    parts: int
    sent_bytes: Ints
    received_bytes: Ints
    wire_bytes: Ints
    stored_bytes: Ints
    pool_bytes: int
    scratch_bytes: int


def exchange_work(
    extend_lens: Sequence[int] | Any,
    seq_lens: Sequence[int] | Any,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    layer: AttentionLayer | None = None,
    placement: str = "replicated",
    exchange: str = "gather",
    ranks_per_host: int = 1,
    state_dtype: str = "float32",
) -> ExchangeWork:
    """Count what each of `cp_size` ranks computes, sends and keeps for a batch.

    Rank r of N computes T_r of T new tokens. Where pools are shared out it first sends the M_r of
    their rows that others keep, ``M_r * row`` bytes, and brings the K_r of all K rows, cached and
    new, that new tokens see in its pool. Replicated pools have M_r = 0, K_r = T_r and K = T. Then
    it sends, in bytes, where each host has one rank::

        gather      (N - 1) * K_r * row
        ring        (K - K_s) * row, s the next rank
        pass_q      (N - 1) * T_r * heads * q + (T - T_r) * heads * state
        all_to_all  T_r * heads of others * q + K_r * KV heads of others * row / num_kv_heads
                    + (T - T_r) * heads of r * output

    ``row`` is `AttentionLayer.kv_row_bytes`, ``q`` a query and ``output`` a row of attention in one
    head, in the dtype of the layer, ``state`` an output in `state_dtype` with its LSE in float32.
    KV heads of others are counted as often as ranks have them: where there are fewer than ranks,
    each is sent to several. By ``"all_to_all"`` replicated pools have all tokens, in the KV heads
    of their host. Where hosts have several ranks, N, r and s are hosts, and rank k of one exchanges
    with rank k of every other: a row crosses each wire once.

    Parameters
    ----------
    extend_lens, seq_lens : ints [bs]
        New tokens of each sequence, and these with the cached ones before them.
    cp_size : int
        Number of ranks.
    strategy : str
        Which rank computes which tokens, as for `build_cp_metadata`.
    layer : AttentionLayer, default one with all defaults
        Which sizes work and bytes are counted for.
    placement : {"replicated", "page_interleave", "token_interleave"}
        Which rank keeps the keys and values of which tokens: all of them, or those of every
        `cp_size`-th page or token of a sequence.
    exchange : {"gather", "ring", "pass_q", "all_to_all"}
        What ranks send: keys and values to all, or step by step round a ring; queries to the keys,
        and states of attention back; or all by heads.
    ranks_per_host : int
        Ranks that share memory; a divisor of `cp_size`.
    state_dtype : {"float32", "bfloat16", "float16"}
        Of the outputs that ``"pass_q"`` sends back to be merged.

    Returns
    -------
    ExchangeWork
        Arrays with an element for each rank.

    Raises
    ------
    TypeError
        For lengths and numbers that are no integers, and a strategy that is no str.
    ValueError
        For lengths that do not match, unknown names, a `ranks_per_host` that does not divide
        `cp_size`, and ``"pass_q"`` where all pools have all keys.

    Examples
    --------
    >>> from cpattn.cost_model import exchange_work
    >>> batch = [4096], [131072]           # 124 Ki tokens are cached
    >>> for exchange in ("gather", "ring", "pass_q", "all_to_all"):
    ...     work = exchange_work(
    ...         *batch, cp_size=8, placement="page_interleave", exchange=exchange
    ...     )
    ...     print(f"{exchange:10} {work.sent_bytes.max() >> 20:5} MiB")
    gather       450 MiB
    ring         450 MiB
    pass_q        86 MiB
    all_to_all    65 MiB
    """
    layer = layer or AttentionLayer()
    check_placing("exchange_work", placement, exchange, cp_size, ranks_per_host, state_dtype)
    counts = BatchCounts(
        extend_lens,
        seq_lens,
        cp_size=cp_size,
        strategy=strategy,
        layer=layer,
        placement=placement,
        ranks_per_host=ranks_per_host,
    )
    return work_of(counts, exchange, state_dtype)


def work_of(counts: BatchCounts, exchange: str, state_dtype: str) -> ExchangeWork:
    """See `exchange_work`."""
    state = ITEM_BYTES[state_dtype]
    ways: dict[str, Callable[[], ExchangeWork]] = {
        "gather": lambda: _rows_to_all(counts, ring=False),
        "ring": lambda: _rows_to_all(counts, ring=True),
        "pass_q": lambda: _queries_to_all(counts, state),
        "all_to_all": lambda: _by_heads(counts),
    }
    return ways[exchange]()


def _rows_to_all(counts: BatchCounts, *, ring: bool) -> ExchangeWork:
    """Keys and values go to every host: at once, or step by step from each to the next."""
    own, layer, hosts = counts.own, counts.layer, counts.num_hosts
    blocks = counts.by_host(counts.shards.seen_rows) * layer.kv_row_bytes
    rails = np.broadcast_to(blocks.sum(0), blocks.shape)
    received = rails - blocks
    pool = counts.by_host(counts.shards.arriving_rows) * layer.kv_row_bytes
    if ring:
        sent = rails - np.roll(blocks, -1, axis=0)
        wire = np.full(hosts, (hosts - 1) * blocks.sum(1).max())
        stored = pool if counts.sharded else rails
        scratch = 2 * int(blocks.max()) if hosts > 1 else 0  # one is read, one arrives
    else:
        sent = blocks * (hosts - 1)
        wire = np.maximum(sent.sum(1), received.sum(1))
        gathered = rails if hosts > 1 else 0 * rails  # ranks of one host read in place
        stored = pool + gathered if counts.sharded else rails
        scratch = int((gathered if counts.sharded else received).max())
    calls = hosts if ring else 1
    return _work(
        counts,
        "ring" if ring else "gather",
        rows=own.tokens * calls,
        calls=calls,
        parts=hosts if ring else layer.num_kv_heads,
        moved=[(sent, received, wire)],
        stored=stored,
        scratch_bytes=scratch,
    )


def _queries_to_all(counts: BatchCounts, state_item_bytes: int) -> ExchangeWork:
    """Queries go to every host, and states of attention to the keys there go back.

    Ranks of a host merge theirs first.
    """
    own, layer, hosts, new = counts.own, counts.layer, counts.num_hosts, counts.shards
    query = layer.num_heads * layer.head_dim * ITEM_BYTES[layer.dtype]
    state = layer.num_heads * (layer.v_dim * state_item_bytes + LSE_BYTES)
    tokens = counts.by_host(own.tokens)
    others = tokens.sum(0) - tokens  # of the rail
    sent, received = tokens * query * (hosts - 1), others * query
    returned, merged = others * state, tokens * state * (hosts - 1)
    total = int(own.tokens.sum())
    share = counts.owner_pairs / max(int(counts.owner_pairs.sum()), 1)
    scratch = others * query + (merged + total * state if counts.cp_size > 1 else 0)
    return _work(
        counts,
        "pass_q",
        pairs=counts.owner_pairs,
        rows=np.where(counts.owner_pairs > 0, total, 0),
        packed_keys=share * counts.alone.packed_keys[0] * layer.num_kv_heads,
        longest_item=share * counts.alone.longest_item[0],
        parts=hosts,
        moved=[
            (sent, received, np.maximum(sent.sum(1), received.sum(1))),
            (returned, merged, np.maximum(returned.sum(1), merged.sum(1))),
        ],
        stored=counts.by_host(new.arriving_rows) * layer.kv_row_bytes,
        scratch_bytes=int(scratch.max()),
    )


def _by_heads(counts: BatchCounts) -> ExchangeWork:
    """Queries, keys and values go to the hosts that have their heads, and outputs go back."""
    own, layer, hosts, new = counts.own, counts.layer, counts.num_hosts, counts.shards
    item = ITEM_BYTES[layer.dtype]
    heads, kv_heads = split_heads(layer, counts.cp_size)
    host_heads, host_kv_heads = (part[:, None] for part in split_heads(layer, hosts))
    query, output = layer.head_dim * item, layer.v_dim * item
    key = layer.kv_row_bytes // layer.num_kv_heads
    tokens, keys = counts.by_host(own.tokens), counts.by_host(new.seen_rows)
    others = tokens.sum(0) - tokens
    sent = tokens * query * (layer.num_heads - host_heads)
    sent = sent + keys * key * (host_kv_heads.sum() - host_kv_heads)
    received = others * query * host_heads + (keys.sum(0) - keys) * key * host_kv_heads
    for_pool = counts.by_host(new.arriving_rows) * layer.kv_row_bytes
    returned = others * host_heads * output
    merged = tokens * (layer.num_heads - host_heads) * output
    rails = keys.sum(0) * host_kv_heads * key
    total = int(own.tokens.sum())
    used = heads > 0
    most_kv_heads = int(kv_heads.max())  # each with as many of the rank's query heads
    group = -(-int(heads.max()) // most_kv_heads)
    attended = counts.alone_with(most_kv_heads * group, most_kv_heads)
    return _work(
        counts,
        "all_to_all",
        pairs=np.where(used, counts.alone.pairs[0], 0),
        heads=heads,
        kv_heads=kv_heads,
        rows=np.where(used, total, 0),
        packed_keys=kv_heads * attended.packed_keys[0],
        longest_item=np.where(used, attended.longest_item[0], 0.0),
        parts=most_kv_heads,
        moved=[
            (sent, received, np.maximum(sent.sum(1), received.sum(1))),
            (returned, merged, np.maximum(returned.sum(1), merged.sum(1))),
        ],
        stored=for_pool + (rails if hosts > 1 else 0 * rails) if counts.sharded else rails,
        scratch_bytes=int((received + merged).max()),
        pool_kv_heads=None if counts.sharded else int(host_kv_heads.max()),
    )


def split_heads(layer: AttentionLayer, parts: int) -> tuple[Ints, Ints]:
    """Query heads of each part, one after the other and as even as can be, and their KV heads."""
    ends = layer.num_heads * np.arange(parts + 1, dtype=np.int64) // parts
    begin, end = ends[:-1], ends[1:]
    group = layer.num_heads // layer.num_kv_heads
    return end - begin, np.where(end > begin, -(-end // group) - begin // group, 0)


def _work(
    counts: BatchCounts,
    exchange: str,
    *,
    moved: list[tuple[Ints, Ints, Ints]],
    stored: Ints,
    pool_kv_heads: int | None = None,
    calls: int = 1,
    **fields: Any,
) -> ExchangeWork:
    """With the attention of a gather where `fields` do not say otherwise."""
    own, layer, size = counts.own, counts.layer, counts.cp_size
    pages = int(pages_per_rank(counts.placement, counts.seq_lens, size, layer.page_size).max())
    if not counts.sharded:  # one pool for the ranks of a host
        pages = -(-pages // counts.ranks_per_host)
    page_bytes = layer.page_size * layer.kv_row_bytes * layer.num_layers
    if pool_kv_heads is not None:
        page_bytes = page_bytes // layer.num_kv_heads * pool_kv_heads
    new = counts.shards
    to_pools, into_pool = (
        counts.by_host(rows - new.kept_at_home) * layer.kv_row_bytes
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
    }
    return ExchangeWork(
        placement=counts.placement,
        exchange=exchange,
        num_hosts=counts.num_hosts,
        tokens=own.tokens,
        calls=calls,
        sent_bytes=sum((sent for sent, _, _ in moved), start=np.int64(0)).ravel(),
        received_bytes=sum((received for _, received, _ in moved), start=np.int64(0)).ravel(),
        wire_bytes=np.stack([*wire, *[0 * wire[0]] * (3 - len(wire))]),
        stored_bytes=stored.ravel(),
        pool_bytes=pages * page_bytes,
        **computed | fields,
    )
