# SPDX-License-Identifier: Apache-2.0
"""Counts of computation, communication and memory of each rank and exchange: exact integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cpattn import _core
from cpattn.context_parallel.exchanges import EXCHANGES, LSE_BYTES, SCRATCH_BYTES

from .counts import BatchCounts, Mesh, check_mesh, check_placing
from .exchanged import ExchangeWork, along_rails, bytes_of, exchanged, heads_of
from .layer import ITEM_BYTES, AttentionLayer, Ints
from .placement import shards, stripes
from .usp import by_mesh


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
    mesh: tuple[int, int] | None = None,
) -> ExchangeWork:
    """Count what each of `cp_size` ranks computes, sends and keeps for a batch.

    Rank r of N computes T_r of T new tokens. With sharded pools it first sends the M_r of their
    rows that other ranks keep, ``M_r * row`` bytes. Of the K rows, cached and new, that new tokens
    see, its pool has K_r. Replicated pools have M_r = 0, K_r = T_r and K = T. With ``"gather"`` M_r
    = 0, too: a rank sends the C_r cached rows of its pool and the T_r new rows that it computes,
    and receivers keep their own new rows. The following bytes are for one rank per host::

        gather      (N - 1) * (C_r + T_r) * row
        ring        (K - K_s) * row, s the next rank
        pass_q      (N - 1) * T_r * heads * q + (T - T_r) * heads * state
        all_to_all  T_r * heads of others * q + K_r * KV heads of others * row / num_kv_heads
                    + (T - T_r) * heads of r * output

        usp         T_r * heads of others * q + K_r * KV heads of others * row / num_kv_heads
                    + (K - K_s) * KV heads of r * row / num_kv_heads
                    + (T_w - T_r) * heads of r * result

    ``row`` is `AttentionLayer.kv_row_bytes`. Per head, ``q`` is a query and ``output`` an attention
    row in the dtype of the layer, ``state`` an output in `state_dtype` with a float32 LSE,
    ``result`` one in the layer's dtype. With ``"usp"``, r splits heads with its row w of the mesh,
    which has T_w tokens, and K_s are the keys of the next row; ranks pad ring blocks to 16 tokens
    of each sequence. KV heads of others count once per rank that has them: if there are fewer than
    ranks, each goes to several. With ``"all_to_all"``, replicated pools have all tokens, in the KV
    heads of their host. If hosts have several ranks, N, r and s count hosts, and rank k of a host
    exchanges with rank k of every other host: a row crosses each wire once.

    Parameters
    ----------
    extend_lens, seq_lens : ints [bs]
        New tokens of each sequence, and its length including them and cached tokens.
    cp_size : int
        Number of ranks.
    strategy : str
        Distribution of tokens over ranks, as for `build_cp_metadata`.
    layer : AttentionLayer, default one with all defaults
        Sizes for the counts.
    placement : {"replicated", "page_interleave", "token_interleave", "token_interleave:I"}
        Placement of keys and values: all tokens on each rank, or every `cp_size`-th page or token
        of a sequence.
    exchange : {"gather", "ring", "pass_q", "all_to_all", "usp"}
        Communication: keys and values to all ranks, or step by step round a ring; queries to the
        keys, with attention states back; everything split by heads; or by heads within rows of a
        mesh, and round a ring of rows.
    ranks_per_host : int
        Ranks that share memory; a divisor of `cp_size`.
    state_dtype : {"float32", "bfloat16", "float16"}
        Dtype of the outputs that ``"pass_q"`` sends back to be merged.
    mesh : (int, int), optional
        Required for ``"usp"``: rows on the ring, and ranks of a row. Rank r is in row
        ``r // mesh[1]``, as in a `DeviceMesh` of that shape with the dimensions ring and heads.

    Returns
    -------
    ExchangeWork
        Arrays with an element for each rank.

    Raises
    ------
    TypeError
        If lengths or numbers are no integers, or `strategy` is no str.
    ValueError
        If lengths do not match, a name is unknown, `ranks_per_host` does not divide `cp_size`,
        ``"pass_q"`` meets replicated pools, or ``"usp"`` has no mesh of all ranks or hosts with
        several ranks.

    Examples
    --------
    >>> from cpattn_lab.cost_model import exchange_work
    >>> batch = [4096], [131072]           # 124 Ki tokens are cached
    >>> for exchange in ("gather", "ring", "pass_q", "all_to_all"):
    ...     work = exchange_work(
    ...         *batch, cp_size=8, placement="page_interleave", exchange=exchange
    ...     )
    ...     print(f"{exchange:10} {work.sent_bytes.max() >> 20:5} MiB")
    gather       448 MiB
    ring         450 MiB
    pass_q        86 MiB
    all_to_all    65 MiB
    """
    layer = AttentionLayer() if layer is None else layer
    function, known = "exchange_work", tuple(EXCHANGES)
    check_placing(function, placement, exchange, cp_size, ranks_per_host, state_dtype, known)
    mesh = check_mesh(function, placement, exchange, cp_size, ranks_per_host, mesh)
    counts = BatchCounts(
        extend_lens,
        seq_lens,
        cp_size=cp_size,
        strategy=strategy,
        layer=layer,
        placement=placement,
        ranks_per_host=ranks_per_host,
    )
    return work_of(counts, exchange, state_dtype, mesh)


def work_of(
    counts: BatchCounts, exchange: str, state_dtype: str, mesh: Mesh | None = None
) -> ExchangeWork:
    """Count for `exchange_work`."""
    if exchange == "usp":
        assert mesh is not None  # `check_mesh`
        return by_mesh(counts, mesh)
    state = ITEM_BYTES[state_dtype]
    ways: dict[str, Callable[[], ExchangeWork]] = {
        "gather": lambda: _rows_to_all(counts, ring=False),
        "ring": lambda: _rows_to_all(counts, ring=True),
        "pass_q": lambda: _queries_to_all(counts, state),
        "all_to_all": lambda: _by_heads(counts),
    }
    return ways[exchange]()


def exchange_taken(counts: BatchCounts, mesh: Mesh | None = None) -> str:
    """Return the choice of "auto" of `ContextParallel` for a layer that also writes its new rows.

    Each rank then counts as its own host.
    """
    if not counts.sharded:
        return "gather"
    layer, lens = bytes_of(counts.layer), counts.seq_lens
    laid = stripes(counts.placement, lens, counts.cp_size, counts.layer.page_size)
    pools = shards(counts.plans, counts.extends, lens, counts.layer, laid, ranks_per_host=1)
    keys, cached = (laid.count_below(ends).sum(1) for ends in (lens, lens - counts.extends))
    arriving = pools.arriving_rows - pools.kept_at_home
    held = _core.HeldRows(counts.own.tokens, keys, pools.seen_rows, keys - cached, arriving)
    ranks = None if mesh is None else np.arange(counts.cp_size).reshape(mesh)
    return _core.choose_exchange(held, layer, ranks, True, SCRATCH_BYTES)[0]


def _rows_to_all(counts: BatchCounts, *, ring: bool) -> ExchangeWork:
    """Count an exchange of keys and values to every host, at once or round a ring."""
    own, layer, hosts = counts.own, counts.layer, counts.num_hosts
    shards = counts.shards  # a gather takes their new rows from the ranks that compute them
    brought = shards.seen_rows if ring else shards.seen_cached_rows + own.tokens
    blocks = counts.by_host(brought) * layer.kv_row_bytes
    rails = np.broadcast_to(blocks.sum(0), blocks.shape)
    sent, received = along_rails(
        lambda rows: _core.send_rows(rows, layer.kv_row_bytes, ring), counts.by_host(brought)
    )
    pool = counts.by_host(counts.shards.arriving_rows) * layer.kv_row_bytes
    cached, cached_scratch = None, 0
    if ring:
        wire = np.full(hosts, (hosts - 1) * blocks.sum(1).max())
        stored = pool if counts.sharded else rails
        scratch = 2 * int(blocks.max()) if hosts > 1 else 0  # one is read, one arrives
    else:
        wire = _wire_of_gather(blocks)
        cached = wire - _wire_of_gather(counts.by_host(own.tokens) * layer.kv_row_bytes)
        gathered = rails if hosts > 1 else 0 * rails  # ranks of one host read in place
        stored = pool + gathered if counts.sharded else rails
        scratch = int((gathered if counts.sharded else received).max())
        if counts.sharded and hosts > 1:
            rows = counts.by_host(shards.seen_cached_rows).sum(0)
            cached_scratch = int(rows.max()) * layer.kv_row_bytes
    calls = hosts if ring else 1
    parts = calls if calls > 1 else 0  # partial results of each row
    return exchanged(
        counts,
        "ring" if ring else "gather",
        rows=own.tokens * calls,
        calls=calls,
        parts=(hosts if ring else 1) * layer.num_kv_heads,
        merged_rows=own.tokens * layer.num_heads * parts,
        moved=[(sent, received, wire)],
        cached_bytes=cached,
        stored=stored,
        scratch_bytes=scratch,
        ahead_bytes=cached_scratch,
    )


def _wire_of_gather(blocks: Ints) -> Ints:
    """Return the bytes on the wire of each host while ranks of a rail gather `blocks`."""
    sent, received = blocks * (len(blocks) - 1), blocks.sum(0) - blocks
    return np.maximum(sent.sum(1), received.sum(1))


def _queries_to_all(counts: BatchCounts, state_item_bytes: int) -> ExchangeWork:
    """Count an exchange of queries to every host, with attention states back.

    Ranks of a host merge their states first.
    """
    own, layer, hosts, new = counts.own, counts.layer, counts.num_hosts, counts.shards
    moving = bytes_of(layer)
    query, state = (
        layer.num_heads * each
        for each in (moving.query, layer.v_dim * state_item_bytes + LSE_BYTES)
    )
    tokens = counts.by_host(own.tokens)
    others = tokens.sum(0) - tokens  # tokens of other ranks of the rail
    sent, received, returned, merged = along_rails(
        lambda rail: _core.send_queries(rail, query, state), tokens
    )
    total = int(own.tokens.sum())
    attended = counts.alone
    share = counts.owner_pairs / max(int(counts.owner_pairs.sum()), 1)
    within = counts.ranks_per_host if counts.ranks_per_host > 1 else 0  # parts of a host
    between = hosts if hosts > 1 else 0
    merged_rows = (tokens * between + tokens.sum(0) * within) * layer.num_heads
    scratch = others * query + (merged + total * state if counts.cp_size > 1 else 0)
    return exchanged(
        counts,
        "pass_q",
        pairs=counts.owner_pairs,
        rows=np.where(counts.owner_pairs > 0, total, 0),
        packed_keys=share * attended.packed_keys[0] * layer.num_kv_heads,
        longest_item=share * attended.longest_item[0],
        parts=layer.num_kv_heads if layer.num_kv_heads > 1 else hosts,
        merged_rows=merged_rows.ravel(),
        moved=[
            (sent, received, np.maximum(sent.sum(1), received.sum(1))),
            (returned, merged, np.maximum(returned.sum(1), merged.sum(1))),
        ],
        stored=counts.by_host(new.arriving_rows) * layer.kv_row_bytes,
        scratch_bytes=int(scratch.max()),
    )


def _by_heads(counts: BatchCounts) -> ExchangeWork:
    """Count an exchange of queries, keys and values by heads, with outputs back."""
    own, layer, hosts, new = counts.own, counts.layer, counts.num_hosts, counts.shards
    moving, group = bytes_of(layer), layer.num_heads // layer.num_kv_heads
    heads, kv_heads = heads_of(layer.num_heads, layer.num_kv_heads, counts.cp_size)
    host_heads = counts.by_host(heads).sum(1, keepdims=True)
    ends = host_heads.cumsum(0)
    host_kv_heads = np.where(host_heads > 0, -(-ends // group) - (ends - host_heads) // group, 0)
    key = moving.key
    tokens, keys = counts.by_host(own.tokens), counts.by_host(new.seen_rows)
    taken = host_heads.ravel(), host_kv_heads.ravel()
    sent, received, returned, merged = along_rails(
        lambda queries, rows: _core.send_by_heads(queries, rows, moving, *taken, moving.output),
        tokens,
        keys,
    )
    for_pool = counts.by_host(new.arriving_rows) * layer.kv_row_bytes
    rails = keys.sum(0) * host_kv_heads * key
    total = int(own.tokens.sum())
    used = heads > 0
    most_kv_heads = int(kv_heads.max())  # each has equally many of the rank's query heads
    group = -(-int(heads.max()) // most_kv_heads)
    attended = counts.alone_with(most_kv_heads * group, most_kv_heads)
    return exchanged(
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
