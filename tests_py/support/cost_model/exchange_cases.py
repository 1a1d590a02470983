# SPDX-License-Identifier: Apache-2.0
"""Batches whose keys the tests keep and exchange row by row, message by message."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

import cpattn
from cpattn import _core
from cpattn_lab.cost_model import AttentionLayer, exchange_work

STRATEGIES = ("zigzag", "interleave", "contiguous")
SHARDED = ("page_interleave", "token_interleave")
EXCHANGES = ("gather", "ring", "pass_q", "all_to_all")
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass
class Case:
    extends: list[int]
    prefixes: list[int]
    num_hosts: int
    ranks_per_host: int
    strategy: str
    placement: str
    layer: AttentionLayer
    state_dtype: str = "float32"
    pages: list[int] = field(default_factory=list)

    @property
    def cp_size(self):
        return self.num_hosts * self.ranks_per_host

    @property
    def seq_lens(self):
        return [n + p for n, p in zip(self.extends, self.prefixes, strict=True)]

    def work(self, exchange):
        names = ("cp_size", "strategy", "layer", "placement", "ranks_per_host", "state_dtype")
        options = {name: getattr(self, name) for name in names}
        return exchange_work(self.extends, self.seq_lens, exchange=exchange, **options)

    def computed(self):
        """Return the tokens (sequence, position) that each rank computes."""
        plans = cpattn.build_cp_metadata_all_ranks(
            self.extends, self.seq_lens, cp_size=self.cp_size, strategy=self.strategy
        )
        pairs = ((plan.query_request_indices, plan.query_cache_lengths) for plan in plans)
        return [
            [(int(request), int(length) - 1) for request, length in zip(*of_rank, strict=True)]
            for of_rank in pairs
        ]

    def owners(self):
        """Return the rank that keeps each token; `pages` gets the number of pages of each rank."""
        size, page_size = self.cp_size, self.layer.page_size
        self.pages = [0] * size
        owner = {}
        for i, length in enumerate(self.seq_lens):
            pages = range(-(-length // page_size))
            if self.placement == "token_interleave":
                owner |= {(i, t): t % size for t in range(length)}
                slots = -(-length // (size * page_size))
                self.pages = [count + slots for count in self.pages]
                continue
            base = min(range(size), key=lambda rank: self.pages[rank])
            for page in pages:
                self.pages[(base + page) % size] += 1
            owner |= {(i, t): (base + t // page_size) % size for t in range(length)}
        return owner

    def visible(self, token):
        sequence, position = token
        window, length = self.layer.window, self.seq_lens[sequence]
        left, right = window if isinstance(window, tuple) else (window, 0)
        end = length if right is None else min(position + 1 + right, length)
        return range(0 if left is None else max(position - left, 0), end)

    def host(self, rank):
        return rank // self.ranks_per_host

    def rail(self, rank):
        """Return the ranks of other hosts that a rank exchanges with, by host."""
        step = self.ranks_per_host
        peers = range(rank % step, self.cp_size, step)
        return {self.host(peer): peer for peer in peers if peer != rank}


@dataclass
class Wire:
    """Bytes that ranks send to ranks of other hosts, message by message."""

    case: Case
    sent: Counter = field(default_factory=Counter)
    received: Counter = field(default_factory=Counter)

    def send(self, source, target, nbytes):
        assert self.case.host(source) != self.case.host(target)
        self.sent[source] += nbytes
        self.received[target] += nbytes

    def totals(self, moved):
        return [moved[rank] for rank in range(self.case.cp_size)]

    def by_host(self):
        hosts = np.zeros((2, self.case.num_hosts), int)
        for rank in range(self.case.cp_size):
            hosts[:, self.case.host(rank)] += self.sent[rank], self.received[rank]
        return hosts.max(0).tolist()


def sizes_of(layer):
    """Return bytes of a row of keys and values, of one KV head of it, a query and an output."""
    item, v_dim = ITEM[layer.dtype], layer.v_head_dim or layer.head_dim
    key = (layer.head_dim if layer.latent else layer.head_dim + v_dim) * item
    return layer.num_kv_heads * key, key, layer.head_dim * item, v_dim * item


def blocks_of(case, new_from_pools=True):
    """Return the rows of each rank: it computes them, or keeps them and a new token sees them."""
    computed = case.computed()
    if case.placement not in SHARDED:
        return [len(tokens) for tokens in computed]
    owner = case.owners()
    seen = {
        (i, t) for i, position in itertools.chain(*computed) for t in case.visible((i, position))
    }
    if new_from_pools:
        return [sum(owner[row] == rank for row in seen) for rank in range(case.cp_size)]
    cached = seen.difference(*computed)
    return [
        len(tokens) + sum(owner[row] == rank for row in cached)
        for rank, tokens in enumerate(computed)
    ]


def count_gather(case):
    """Count a gather: ranks send computed rows to all ranks, also to those that keep them."""
    wire, (row, *_) = Wire(case), sizes_of(case.layer)
    for rank, rows in enumerate(blocks_of(case, new_from_pools=False)):
        for peer in case.rail(rank).values():
            wire.send(rank, peer, rows * row)
    return wire, wire.by_host(), None


def count_ring(case):
    """Count a ring: every rank passes on its block until all ranks have had all blocks."""
    wire, (row, *_) = Wire(case), sizes_of(case.layer)
    held, busy = blocks_of(case), 0
    for _ in range(case.num_hosts - 1):
        hosts = Counter()
        for rank, rows in enumerate(held):
            wire.send(rank, (rank + case.ranks_per_host) % case.cp_size, rows * row)
            hosts[case.host(rank)] += rows * row
        busy += max(hosts.values())
        held = [held[rank - case.ranks_per_host] for rank in range(case.cp_size)]
    return wire, [busy] * case.num_hosts, None


def count_rows_to_pools(case):
    wire, (row, *_) = Wire(case), sizes_of(case.layer)
    if case.placement not in SHARDED:
        return wire
    owner = case.owners()
    for rank, tokens in enumerate(case.computed()):
        for token in tokens:
            home = case.host(owner[token])
            if home != case.host(rank):
                wire.send(rank, case.rail(rank)[home], row)
    return wire


def count_pass_q(case):
    wire, back, (_, _, query, _) = Wire(case), Wire(case), sizes_of(case.layer)
    layer = case.layer
    state = (layer.v_head_dim or layer.head_dim) * ITEM[case.state_dtype] + 4
    for rank, tokens in enumerate(case.computed()):
        for _, peer in itertools.product(tokens, case.rail(rank).values()):
            wire.send(rank, peer, layer.num_heads * query)
            back.send(peer, rank, layer.num_heads * state)
    return wire, wire.by_host(), back


def heads_of_hosts(case):
    """Return the query heads of each host, from the heads that `ContextParallel` gives to ranks."""
    found = [[] for _ in range(case.num_hosts)]
    shares = _core.share_heads(case.layer.num_heads, case.layer.num_kv_heads, case.cp_size)
    for rank, share in enumerate(shares):
        found[case.host(rank)] += range(share.q.start, share.q.stop)
    return found


def count_all_to_all(case):
    wire, back, (_, key, query, output) = Wire(case), Wire(case), sizes_of(case.layer)
    group = case.layer.num_heads // case.layer.num_kv_heads
    heads = heads_of_hosts(case)
    kv_heads = [{head // group for head in part} for part in heads]
    for rank, tokens in enumerate(case.computed()):
        for _, (host, peer) in itertools.product(tokens, case.rail(rank).items()):
            wire.send(rank, peer, len(heads[host]) * query)
            back.send(peer, rank, len(heads[host]) * output)
    for rank, rows in enumerate(blocks_of(case)):
        for host, peer in case.rail(rank).items():
            wire.send(rank, peer, rows * len(kv_heads[host]) * key)
    return wire, wire.by_host(), back


COUNTED = {
    "gather": count_gather,
    "ring": count_ring,
    "pass_q": count_pass_q,
    "all_to_all": count_all_to_all,
}

_SIDES = st.none() | st.integers(0, 12)
layers = st.builds(
    lambda kv_heads, group, dims, **others: AttentionLayer(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dims[0],
        v_head_dim=dims[1],
        num_layers=3,
        **others,
    ),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    dims=st.sampled_from([(32, 32), (48, 16)]),
    latent=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    page_size=st.integers(1, 5),
    window=st.one_of(_SIDES, st.tuples(_SIDES, _SIDES)),
)


@st.composite
def cases(draw, placements=("replicated", *SHARDED)):
    lengths = draw(
        st.lists(st.tuples(st.integers(0, 14), st.integers(0, 20)), min_size=1, max_size=4)
    )
    return Case(
        extends=[new for new, _ in lengths],
        prefixes=[cached for _, cached in lengths],
        num_hosts=draw(st.integers(1, 4)),
        ranks_per_host=draw(st.integers(1, 3)),
        strategy=draw(st.sampled_from(STRATEGIES)),
        placement=draw(st.sampled_from(placements)),
        layer=draw(layers),
        state_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
    )
