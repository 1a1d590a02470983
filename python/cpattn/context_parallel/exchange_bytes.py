# SPDX-License-Identifier: Apache-2.0
"""Bytes that ranks receive by each exchange, and which exchange "auto" takes: one count, one rule.

`ContextParallel` and `cpattn plan` both decide by it. Arrays begin with an axis of ranks, or of
hosts where those of a rail exchange with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LSE_BYTES = 4  # float32, of each token and head
# A wire of 1 GB/s moves about this while a thread merges an element of a partial result (2.7 ns).
MERGE_BYTES = 3
ROUND_BYTES = 256 << 10  # what a wire of 1 to 3 GB/s moves while ranks wait for another round
SCRATCH_BYTES = 256 << 20  # the default of ContextParallel's max_scratch_bytes


class Layer(NamedTuple):
    """Heads of a layer, and the bytes of a token in one of them."""

    num_heads: int
    num_kv_heads: int
    query: int
    key: int  # with its value
    output: int
    merged: int  # elements of an output

    @property
    def row(self) -> int:
        """Bytes of the keys and values of a token."""
        return self.num_kv_heads * self.key

    def is_even(self, size: int) -> bool:
        """Whether so many ranks have as many heads each, and as many KV heads."""
        divided = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return self.num_heads % size == 0 and divided


class Held(NamedTuple):
    """Rows of a batch that each rank has: arrays [ranks], int64."""

    tokens: Ints  # that it computes
    keys: Ints  # that it keeps, cached and new: these go round a ring
    seen: Ints  # that it keeps, of these the ones from the first that a query sees
    new_keys: Ints  # that it keeps, of these the new ones
    arriving: Ints  # new ones that it keeps and another rank computes


def shared_heads(num_heads: int, num_kv_heads: int, parts: int) -> tuple[Ints, Ints]:
    """Query heads and KV heads of each part: whole groups of a KV head, or parts of one group."""
    group = num_heads // num_kv_heads
    if num_kv_heads >= parts:
        taken = np.diff(np.arange(parts + 1, dtype=np.int64) * num_kv_heads // parts)
        return taken * group, taken
    of_part = np.arange(parts, dtype=np.int64) * num_kv_heads // parts
    turns = np.bincount(of_part, minlength=num_kv_heads)[of_part]
    turn = np.arange(parts) - np.searchsorted(of_part, of_part)
    heads = group * (turn + 1) // turns - group * turn // turns
    return heads, (heads > 0).astype(np.int64)


def by_rows(rows: Ints, row: int) -> Ints:
    """Return the bytes that ranks receive by "gather" or "ring": the rows of all others."""
    return (rows.sum(0) - rows) * row


def by_queries(tokens: Ints, layer: Layer, state: int) -> tuple[Ints, Ints]:
    """Return the bytes that ranks receive by "pass_q": before attention, and after it.

    They are the queries of all others, then a state from each of them for the own queries.
    """
    asked = (tokens.sum(0) - tokens) * layer.num_heads * layer.query
    return asked, (len(tokens) - 1) * tokens * layer.num_heads * state


def by_heads(
    tokens: Ints, keys: Ints, layer: Layer, heads: Ints, kv_heads: Ints, result: int
) -> tuple[Ints, Ints]:
    """Return the bytes that ranks receive by "all_to_all": before attention, and after it.

    They are queries and keys in the own heads, then results in those of others.
    """
    asked = (tokens.sum(0) - tokens) * heads * layer.query
    brought = (keys.sum(0) - keys) * kv_heads * layer.key
    return asked + brought, tokens * (layer.num_heads - heads) * result


def received_bytes(
    held: Held, layer: Layer, mesh: Ints | None = None, *, writes: bool
) -> dict[str, int]:
    """Bytes of the rank that receives most, for each exchange of a layer.

    With `writes`, new keys and values go to the ranks that keep them, too; "gather" sends them
    once, from where they are computed. `mesh` has the ranks of each row, for "usp".
    """
    tokens, keys, seen = held.tokens, held.keys, held.seen
    heads, kv_heads = shared_heads(layer.num_heads, layer.num_kv_heads, len(tokens))
    state = layer.output + LSE_BYTES
    rows = seen - held.new_keys + tokens if writes else seen
    of_heads = by_heads(tokens, seen, layer, heads, kv_heads, layer.output)
    received: dict[str, Ints] = {
        "pass_q": np.add(*by_queries(tokens, layer, state)),
        "gather": by_rows(rows, layer.row),
        "ring": by_rows(keys, layer.row),
        "all_to_all": np.add(*of_heads),
    }
    if mesh is not None:
        received["usp"] = _by_mesh(held, layer, mesh, state)
    written = held.arriving * layer.row if writes else 0
    return {
        name: int((count if name == "gather" else count + written).max())
        for name, count in received.items()
    }


def cheapest(
    held: Held,
    layer: Layer,
    received: Mapping[str, int],
    max_scratch_bytes: int = SCRATCH_BYTES,
    mesh: Ints | None = None,
) -> tuple[str, str]:
    """Return the exchange that "auto" takes for a layer of a prefill, and the sizes that decided.

    It is the one of the fewest bytes among "gather", "all_to_all", "usp" and "pass_q", an element
    that is merged counting as `MERGE_BYTES`; of equal ones the first, for those before "usp" have
    the bits of one pool. Heads must be even for "all_to_all" and "usp". "ring" takes the place of
    a "gather" that has no room for a KV head.
    """
    size = len(held.tokens)
    named = ["gather", "all_to_all", "pass_q"]
    if not layer.is_even(size):
        named.remove("all_to_all")
    if mesh is not None and layer.is_even(mesh.shape[1]):
        named.insert(-1, "usp")
    merging = _merge_bytes(held, layer, mesh)
    cost = {each: received[each] + merging.get(each, 0) for each in named}
    name = min(named, key=lambda each: cost[each])
    others = ", ".join(f"{each} {received[each]}" for each in named if each != name)
    reason = f"a rank receives at most {received[name]} bytes, by {others}"
    told = [f"{each} {merging[each]}" for each in named if each in merging]
    reason += f"; merging counts as bytes, too: {', '.join(told)}"
    if "all_to_all" not in named:
        reason += f"; {layer.num_heads} and {layer.num_kv_heads} heads are uneven on {size} ranks"
    # Arriving for the next round, arrived, and in their places.
    scratch = (2 if layer.num_kv_heads == 1 else 3) * int(held.keys.sum()) * layer.key
    if name == "gather" and scratch > max_scratch_bytes:
        name = "ring"
        reason += f"; a KV head takes {scratch} bytes, more than max_scratch_bytes"
    return name, reason


def received_state_bytes(
    num_tokens: int, num_heads: int, output: int, size: int, out_heads: str
) -> dict[str, int]:
    """Bytes of partial results of a decode step that the busiest rank receives, by each exchange.

    Heads are shared out as evenly as can be. Where `out_heads` is "all", merged ones go to all.
    """
    state = num_tokens * (output + LSE_BYTES)  # of one head
    own, _ = shared_heads(num_heads, num_heads, size)
    others = num_heads - own if out_heads == "all" else 0
    return {
        "gather": (size - 1) * num_heads * state,
        "all_to_all": int(((size - 1) * own + others).max()) * state,
    }


def cheapest_states(received: Mapping[str, int], out_heads: str) -> tuple[str, str]:
    """Return the exchange that "auto" takes for a decode step, and the sizes that decided.

    It is the one of fewer bytes, a second round counting as `ROUND_BYTES`; of equal ones "gather".
    """
    cost = dict(received)
    if out_heads == "all":
        cost["all_to_all"] += ROUND_BYTES
    name = min(cost, key=lambda each: cost[each])
    others = ", ".join(f"{each} {count}" for each, count in received.items() if each != name)
    reason = f"a rank receives at most {received[name]} bytes, by {others}"
    if cost["all_to_all"] > received["all_to_all"]:
        reason += f"; all_to_all takes a second round, which is worth {ROUND_BYTES} bytes"
    return name, reason


def _by_mesh(held: Held, layer: Layer, mesh: Ints, result: int) -> Ints:
    """Return the bytes that ranks receive by "usp", without the rest of pages on the ring."""
    tokens, keys = held.tokens[mesh].T, held.keys[mesh].T  # [columns, ring]
    heads, kv_heads = shared_heads(layer.num_heads, layer.num_kv_heads, len(tokens))
    heads, kv_heads = heads[:, None], kv_heads[:, None]
    within = np.add(*by_heads(tokens, keys, layer, heads, kv_heads, result))
    passed_on = by_rows(keys.sum(0), layer.key) * kv_heads
    received = np.zeros_like(held.tokens)
    received[mesh] = (within + passed_on).T
    return received


def _merge_bytes(held: Held, layer: Layer, mesh: Ints | None) -> dict[str, int]:
    """Merging on the rank that merges most as bytes, for exchanges that merge partial results."""
    element = MERGE_BYTES * layer.merged
    most = int(held.tokens.max()) * layer.num_heads
    counts = {"pass_q": len(held.tokens) * most * element}
    if mesh is not None:
        heads, _ = shared_heads(layer.num_heads, layer.num_kv_heads, mesh.shape[1])
        parts = int(held.tokens[mesh].sum(1).max()) * int(heads.max())
        counts["usp"] = len(mesh) * parts * element
    return counts
