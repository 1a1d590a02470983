# SPDX-License-Identifier: Apache-2.0
"""The seconds of a layer, from the work of an exchange: one thing after another, or side by side.

Everything is in seconds, bytes and bytes per second; a host has one wire, which its ranks share::

    digests = latency + peers * message           peers = hosts - 1
    rows    = wire_bytes to other pools / gather_gb_per_s + latency + peers * message
    before  = wire_bytes before attention / gather_gb_per_s + steps * latency + peers * message
    after   = wire_bytes after it / gather_gb_per_s + latency + peers * message
    layer   = attention + digests + rows + before + after + store

Attention is with the merge of partial results, where there are any, and with the LSE for it.

Rows go to the ranks that keep them only where pools are shared out, and with ``"gather"`` among
others. A ring has a step for each peer, all others one. ``"usp"`` swaps heads within the rows of
its mesh, queries and keys before the ring and results after it: swaps have the others of a row as
peers. Besides it only ``"pass_q"`` and ``"all_to_all"`` have something to send back. With
overlap, parts of attention take turns with parts of the exchange, as
`overlapped_seconds` says, and nobody waits for the store::

    layer = max(digests + rows + overlapped, store)      or the sum above, if that is less

where rows are among what overlaps, but in ``"usp"``.

With overlap a layer ahead, cached rows of shared-out pools that a gather brings are on the wire
while the layer before is computed, behind the new rows of that layer::

    layer = max(digests + overlapped without them, digests + before + latency + messages, store)

This is a layer among others: before the first one its cached rows are waited for.

Where a host has fewer CPUs than its ranks have threads, attention, store, latencies and messages
take ``ranks_per_host * threads / cpus`` times as long; the wire does not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .exchanged import ExchangeWork
from .layer import AttentionLayer
from .rates import Rates, Seconds, attention_seconds, merge_seconds


class LayerSeconds(NamedTuple):
    """One layer of one batch; `hidden` is what its parts take longer than the whole."""

    attention: Seconds  # [cp_size], merges among it
    exchange: Seconds  # [cp_size]
    store: float
    hidden: float

    @property
    def whole(self) -> float:
        """Seconds until the slowest rank is done."""
        return float(self.attention.max() + self.exchange.max()) + self.store - self.hidden


def crowding(rates: Rates, ranks_per_host: int, cpus: int | None) -> float:
    """Return how much longer a rank computes because its host has fewer CPUs than threads."""
    return 1.0 if cpus is None else max(1.0, ranks_per_host * rates.threads / cpus)


def layer_seconds(
    work: ExchangeWork, layer: AttentionLayer, rates: Rates, *, overlap: str, slower: float
) -> LayerSeconds:
    """Seconds of one layer; `overlap` is that of `predict`, `slower` that of `crowding`."""
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
    swaps = 0.0  # of queries, and of keys and values, to ranks of their heads
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
    slowest = float(attention.max())
    if not peers:
        return seconds._replace(hidden=min(slowest, store))
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
            attention=float(attending.max()),
            merge=float(merge.max()),
            call=1e-6 * slower * rates.call_us,
            routed=routed if by_parts else 0.0,
            before=float((before - swapped - ahead).max()) + first,
            after=float(after.max()) + last,
            once=once,
        )
    )
    if ahead.any():  # the same wire, and an exchange more
        whole = max(whole, once + float(before.max()) + 2 * first)
    return seconds._replace(hidden=max(seconds.whole - max(whole, store), 0.0))


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
    """Seconds of attention and exchange that run side by side, in parts.

    ::

        ring, usp   max(r + n * a, routed + before + a) + after + merge
        gather      b + (n - 1) * max(a, b) + a
        all_to_all  b + (n - 1) * max(a, b + c) + a + c
        pass_q      b + (n - 1) * max(a, b + c) + a + c + merge
                    routed + max(n * a, before + a) + c + merge     with one KV head

    with n parts, each of a seconds of attention, b of what comes before and c of what comes after.
    A ring begins with what the host has, of which the new rows of the first KV head must be there,
    in r seconds; the part that comes last is attended to behind all others. The others go by KV
    heads, of which the first must be there and the last is waited for; ``"pass_q"`` with one head
    by hosts, the own queries first. Each of their parts is an exchange and a call of its own, with
    a latency and messages.

    Parameters
    ----------
    work : ExchangeWork
        Its `parts` are n.
    attention, call, before, after : float
        Seconds of the slowest rank: attention in `work.calls` calls, each of which costs `call`,
        and the exchange before and after it.
    merge : float
        Seconds of the rank that merges most.
    routed : float
        Seconds of new rows on their way to the ranks that keep them, where they go by parts, too.
    once : float
        Latency and messages that `routed`, `before` and `after` have.

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
