# SPDX-License-Identifier: Apache-2.0
"""Seconds of a layer, from the work of an exchange, in sequence or with overlap.

Units are seconds, bytes and bytes per second; ranks of a host share its one wire::

    digests = latency + peers * message           peers = hosts - 1
    rows    = wire_bytes to other pools / gather_gb_per_s + latency + peers * message
    before  = wire_bytes before attention / gather_gb_per_s + steps * latency + peers * message
    after   = wire_bytes after it / gather_gb_per_s + latency + peers * message
    layer   = attention + digests + rows + before + after + store

Attention includes the merge of partial results and the LSE for it, if there are any.

Rows go to the ranks that keep them only with sharded pools; with ``"gather"`` they go among others.
A ring has a step for each peer, other exchanges have one. ``"usp"`` swaps heads within the rows of
its mesh, queries and keys before the ring and results after it; peers of a swap are the other ranks
of a row. Otherwise only ``"pass_q"`` and ``"all_to_all"`` send results back. With overlap, parts of
attention, each with its part of the store, alternate with parts of the exchange (see
`overlapped_seconds`)::

    layer = digests + rows + overlapped                  or the sum above, if that is less

where rows are part of the overlap, except in ``"usp"``. On a host whose CPUs are all busy with
attention, ``sent and received bytes / exchange_cpu_gb_per_s`` are added to attention.

With overlap a layer ahead, cached rows of sharded pools for a gather travel while the previous
layer is computed, after the new rows of that layer::

    layer = max(digests + overlapped without them, digests + before + latency + messages)

This holds for a layer after others: the first layer waits for its cached rows.

If a host has fewer CPUs than its ranks have threads, attention, store, latencies and messages take
``ranks_per_host * threads / cpus`` times as long; the wire does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .exchanged import ExchangeWork
from .layer import AttentionLayer
from .rates import Rates, Seconds, attention_seconds, merge_seconds


class LayerSeconds(NamedTuple):
    """Seconds of one layer of one batch; `hidden` is the sum of its parts minus the whole."""

    attention: Seconds  # [cp_size], merges included
    exchange: Seconds  # [cp_size]
    store: float
    hidden: float

    @property
    def whole(self) -> float:
        """Seconds until the slowest rank is done."""
        return float(self.attention.max() + self.exchange.max()) + self.store - self.hidden


def crowding(rates: Rates, ranks_per_host: int, cpus: int | None) -> float:
    """Return the slow-down of a rank on a host with fewer CPUs than threads."""
    return 1.0 if cpus is None else max(1.0, ranks_per_host * rates.threads / cpus)


def layer_seconds(
    work: ExchangeWork,
    layer: AttentionLayer,
    rates: Rates,
    *,
    overlap: str,
    cpus: int | None,
) -> LayerSeconds:
    """Return the seconds of one layer; `overlap` and `cpus` as in `predict`."""
    ranks_per_host = len(work.tokens) // work.num_hosts
    slower = crowding(rates, ranks_per_host, cpus)
    merge = slower * merge_seconds(rates, layer, work.merged_rows)
    attending = slower * attention_seconds(
        rates,
        layer,
        pairs=work.pairs,
        rows=work.rows,
        heads=work.heads,
        packed=work.packed_keys,
        longest=work.longest_item,
        calls=work.calls,
        lse=bool(work.merged_rows.any()),
    )
    attention = attending + merge
    peers = work.num_hosts - 1
    once = 1e-6 * slower * (rates.latency_us + peers * rates.message_us) if peers else 0.0
    apart = work.placement != "replicated" and work.exchange != "gather"
    rows = once if apart else 0.0
    first = last = once
    if work.exchange == "ring":
        first = 1e-6 * slower * peers * (rates.latency_us + rates.message_us)
    if work.exchange not in ("pass_q", "all_to_all"):
        last = 0.0
    swaps = 0.0  # swaps of queries, and of keys and values, to the ranks of their heads
    if work.mesh is not None:
        steps, others = work.mesh[0] - 1, work.mesh[1] - 1
        last = 1e-6 * slower * (rates.latency_us + others * rates.message_us) if others else 0.0
        first, swaps = 1e-6 * slower * steps * (rates.latency_us + rates.message_us), 2 * last
    to_pools, before, after = work.wire_bytes / (1e9 * rates.gather_gb_per_s)
    swapped = work.swapped_bytes / (1e9 * rates.gather_gb_per_s)
    by_host = to_pools + before + after + (once + rows + swaps + first + last)
    store = slower * float(work.stored_bytes.max()) / (1e9 * rates.store_gb_per_s)
    seconds = LayerSeconds(attention, np.repeat(by_host, len(attention) // len(by_host)), store, 0)
    if overlap == "none":
        return seconds
    if work.exchange in ("ring", "usp"):  # a message for each part that travels
        more = (work.calls - 1) * (work.parts // work.calls - 1)
        first += 1e-6 * slower * more * rates.message_us
    if not peers:
        return seconds
    occupied = float(attending.max()) + store
    if cpus is not None and ranks_per_host * rates.threads >= cpus:
        moved = float((work.sent_bytes + work.received_bytes).max())
        occupied += slower * moved / (1e9 * rates.exchange_cpu_gb_per_s)
    ahead = work.cached_bytes / (1e9 * rates.gather_gb_per_s) if overlap == "ahead" else 0 * before
    by_parts = work.exchange in ("ring", "pass_q", "all_to_all")  # new rows to their pools, too
    routed = rows + float(to_pools.max())
    whole = (
        once
        + (0.0 if by_parts else routed)
        + swaps
        + float(swapped.max())
        + overlapped_seconds(
            work,
            attention=occupied,
            merge=float(merge.max()),
            call=1e-6 * slower * rates.call_us,
            routed=routed if by_parts else 0.0,
            before=float((before - swapped - ahead).max()) + first,
            after=float(after.max()) + last,
            once=once,
        )
    )
    if ahead.any():  # the same wire, and one more exchange
        whole = max(whole, once + float(before.max()) + 2 * first)
    return seconds._replace(hidden=max(seconds.whole - whole, 0.0))


def overlapped_seconds(
    work: ExchangeWork,
    *,
    attention: float,
    merge: float,
    call: float,
    routed: float,
    before: float,
    after: float,
    once: float,
) -> float:
    """Return the seconds of attention and exchange that overlap in parts.

    ::

        ring, usp   max(r + n * a, routed + before + a) + after + merge
        gather      b + (n - 1) * max(a, b) + a
        all_to_all  b + (n - 1) * max(a, b + c) + a + c
        pass_q      b + (n - 1) * max(a, b + c) + a + c + merge
                    routed + max(n * a, before + a) + c + merge     with one KV head

    with n parts, each with a seconds of attention, b seconds of exchange before it and c seconds
    after it. A ring begins with the host's keys, whose first KV head must have its new rows, after
    r seconds; the part that arrives last is attended to last. The other exchanges go by KV heads:
    the first must have arrived, and the last is waited for. ``"pass_q"`` with one head goes by
    hosts, the own queries first. Each part is an exchange and a call, with latency and messages.

    Parameters
    ----------
    work : ExchangeWork
        Work with n `parts`.
    attention, call, before, after : float
        Seconds of the slowest rank: attention in `work.calls` calls and what else keeps its CPUs
        busy, the cost of each call, and the exchange before and after it.
    merge : float
        Seconds of the rank that merges most.
    routed : float
        Seconds of new rows to the ranks that keep them, if they go by parts, too.
    once : float
        Latency and messages in `routed`, `before` and `after`.

    Returns
    -------
    float
    """
    parts = work.parts
    a = (attention + (parts - work.calls) * call) / parts

    def of_part(seconds: float, parts: int) -> float:
        return once + (seconds - once) / parts if seconds else 0.0

    if work.exchange in ("ring", "usp"):
        first = of_part(routed, parts // work.num_hosts)
        return max(first + parts * a, routed + before + a) + after + merge
    if work.exchange == "pass_q" and work.kv_heads[0] == 1:
        return routed + max(parts * a, before + a) + of_part(after, parts) + merge
    b = of_part(routed, parts) + of_part(before, parts)
    if work.exchange == "gather":
        return b + (parts - 1) * max(a, b) + a
    c = of_part(after, parts)
    return b + (parts - 1) * max(a, b + c) + a + c + merge
