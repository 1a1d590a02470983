# SPDX-License-Identifier: Apache-2.0
"""All exchanges and placements: what each needs, what ranks receive by it, and what "auto" takes.

`ContextParallel`, the cost model and the replay read these tables. Whoever adds an exchange adds an
entry of `EXCHANGES`, a module of its name in ``distributed/layers``, which ``sharded_attend`` runs,
and its work in the cost model; a test says what is missing. Arrays begin with an axis of ranks, or
of hosts where those of a rail exchange with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PLACEMENTS = {
    "replicated": "every rank has all keys",
    "page_interleave": "a rank keeps every cp_size-th page of a sequence",
    "token_interleave": "a rank keeps every cp_size-th token of a sequence, or run of tokens",
}
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


def _of_gather(held: Held, layer: Layer, mesh: Ints | None, writes: bool) -> Ints:
    rows = held.seen - held.new_keys + held.tokens if writes else held.seen
    return by_rows(rows, layer.row)


def _of_ring(held: Held, layer: Layer, mesh: Ints | None, writes: bool) -> Ints:
    return by_rows(held.keys, layer.row) + _written(held, layer, writes)


def _of_pass_q(held: Held, layer: Layer, mesh: Ints | None, writes: bool) -> Ints:
    asked, returned = by_queries(held.tokens, layer, layer.output + LSE_BYTES)
    return asked + returned + _written(held, layer, writes)


def _of_all_to_all(held: Held, layer: Layer, mesh: Ints | None, writes: bool) -> Ints:
    heads, kv_heads = shared_heads(layer.num_heads, layer.num_kv_heads, len(held.tokens))
    moved = by_heads(held.tokens, held.seen, layer, heads, kv_heads, layer.output)
    return np.add(*moved) + _written(held, layer, writes)


def _of_usp(held: Held, layer: Layer, mesh: Ints | None, writes: bool) -> Ints:
    """Count without the rest of pages on the ring."""
    assert mesh is not None
    tokens, keys = held.tokens[mesh].T, held.keys[mesh].T  # [columns, ring]
    heads, kv_heads = shared_heads(layer.num_heads, layer.num_kv_heads, len(tokens))
    heads, kv_heads = heads[:, None], kv_heads[:, None]
    result = layer.output + LSE_BYTES
    within = np.add(*by_heads(tokens, keys, layer, heads, kv_heads, result))
    passed_on = by_rows(keys.sum(0), layer.key) * kv_heads
    received = np.zeros_like(held.tokens)
    received[mesh] = (within + passed_on).T
    return received + _written(held, layer, writes)


def _written(held: Held, layer: Layer, writes: bool) -> Ints:
    """Bytes of new rows that go to the ranks that keep them."""
    return held.arriving * layer.row if writes else np.zeros_like(held.arriving)


def _merged_by_pass_q(held: Held, layer: Layer, mesh: Ints | None) -> int:
    return len(held.tokens) * int(held.tokens.max()) * layer.num_heads


def _merged_by_usp(held: Held, layer: Layer, mesh: Ints | None) -> int:
    assert mesh is not None
    heads, _ = shared_heads(layer.num_heads, layer.num_kv_heads, mesh.shape[1])
    return len(mesh) * int(held.tokens[mesh].sum(1).max()) * int(heads.max())


@dataclass(frozen=True)
class Exchange:
    """One way to bring the queries and the keys of all ranks together."""

    received: Callable[[Held, Layer, Ints | None, bool], Ints]
    """Counts the bytes that each rank receives in a layer, new rows included if it writes them."""
    preference: int | None
    """Place among equals for "auto", the lowest first; None where "auto" has another reason."""
    merged: Callable[[Held, Layer, Ints | None], int] | None = None
    """Counts the outputs of a head that the rank that merges most merges; None if none does."""
    needs_mesh: bool = False
    needs_even_heads: bool = False
    """Whether "auto" takes it only where ranks have as many heads and KV heads each."""
    needs_shards: bool = False
    """Whether it has no meaning where every rank has all keys."""
    reads_in_place: bool = False
    """Whether it reads each shard where it is, so that scales of tokens fit, and each rank may have
    its own scales; the others read copies of all ranks' keys."""
    writes: bool = True
    """Whether it writes new keys itself, some heads while it attends with others."""
    rounds_twice: bool = False
    """Whether results are merged of rounded partial results."""
    takes_return_lse: bool = False
    """Whether it merges nothing, so that an LSE is for the caller alone, and takes time."""
    sends_wanted_lse: bool = False
    """Whether it sends the LSE only where it is wanted, so that all ranks must want it, or none."""


EXCHANGES = {
    "gather": Exchange(_of_gather, 0, takes_return_lse=True),
    "ring": Exchange(_of_ring, None, rounds_twice=True),
    "pass_q": Exchange(
        _of_pass_q, 3, _merged_by_pass_q, needs_shards=True, reads_in_place=True, rounds_twice=True
    ),
    "all_to_all": Exchange(
        _of_all_to_all, 1, needs_even_heads=True, takes_return_lse=True, sends_wanted_lse=True
    ),
    "usp": Exchange(
        _of_usp, 2, _merged_by_usp, needs_mesh=True, needs_even_heads=True, writes=False,
        rounds_twice=True,
    ),
}  # fmt: skip
ON_ALL_RANKS = tuple(name for name, exchange in EXCHANGES.items() if not exchange.needs_mesh)
"""Names of the exchanges that need no mesh."""


def received_bytes(
    held: Held, layer: Layer, mesh: Ints | None = None, *, writes: bool
) -> dict[str, int]:
    """Bytes of the rank that receives most, for each exchange of a layer.

    With `writes`, new keys and values go to the ranks that keep them, too; "gather" sends them
    once, from where they are computed. `mesh` has the ranks of each row, for "usp".
    """
    return {
        name: int(exchange.received(held, layer, mesh, writes).max())
        for name, exchange in EXCHANGES.items()
        if mesh is not None or not exchange.needs_mesh
    }


def cheapest(
    held: Held,
    layer: Layer,
    received: Mapping[str, int],
    max_scratch_bytes: int = SCRATCH_BYTES,
    mesh: Ints | None = None,
) -> tuple[str, str]:
    """Return the exchange that "auto" takes for a layer of a prefill, and the sizes that decided.

    It is the one of the fewest bytes among those with a `preference`, an element that is merged
    counting as `MERGE_BYTES`; of equal ones the first, for those before "usp" have the bits of one
    pool. "ring" takes the place of a "gather" that has no room for a KV head.
    """
    size = len(held.tokens)
    named = sorted(
        (name for name in received if _is_choice(EXCHANGES[name], layer, size, mesh)),
        key=lambda name: EXCHANGES[name].preference or 0,
    )
    merging = {
        name: MERGE_BYTES * layer.merged * merged(held, layer, mesh)
        for name in named
        if (merged := EXCHANGES[name].merged)
    }
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


def _is_choice(exchange: Exchange, layer: Layer, size: int, mesh: Ints | None) -> bool:
    if exchange.preference is None:
        return False
    among = mesh.shape[1] if exchange.needs_mesh and mesh is not None else size
    return not exchange.needs_even_heads or layer.is_even(among)


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
