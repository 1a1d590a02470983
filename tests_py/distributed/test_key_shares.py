# SPDX-License-Identifier: Apache-2.0
"""Keys that ranks hold, and the keys that rows see, against a list of all pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from cpattn.distributed.layers.ring import ring_schedule
from cpattn.distributed.plans.sequence_call import RowMask, Visibility, sequence_call
from cpattn.distributed.plans.tokens import Rows
from cpattn.kv import PageInterleave, TokenInterleave
from support.distributed.planning import first_of, key_shares
from support.distributed.sharded_worker import PLACEMENTS


class Unnamed:
    """A placement with only the required attributes; it deals out tokens one by one."""

    def __init__(self, size: int) -> None:
        self.shard_size = size

    def owner_of(self, slots):
        return slots % self.shard_size

    def local_index(self, slots):
        return slots // self.shard_size


class Misnamed(Unnamed):
    """Placement of single tokens with misleading attributes and always the same name."""

    page_size = interleave = 4

    def __repr__(self) -> str:
        return "Misnamed()"


class Shifted(Unnamed):
    """Placement of pairs, as lists, to rows that do not begin at multiples of a pair."""

    def owner_of(self, slots):
        return (slots // 2 % self.shard_size).tolist()

    def local_index(self, slots):
        return (slots // 2 // self.shard_size * 2 + slots % 2 + 1).tolist()


class Derived(PageInterleave):
    """A placement that places single tokens, although its base class places pages."""

    owner_of, local_index = Unnamed.owner_of, Unnamed.local_index


class Pages(Unnamed):
    """Placement of pages without an attribute that says so."""

    def __init__(self, size: int, page: int) -> None:
        pages = PageInterleave(shard_size=size, page_size=page)
        self.shard_size, self.owner_of, self.local_index = size, pages.owner_of, pages.local_index


PLACEMENTS_AND_OTHERS = PLACEMENTS | {
    "threes of tokens": lambda size, page: TokenInterleave(shard_size=size, interleave=3),
    "pairs of pages": lambda size, page: PageInterleave(shard_size=size, page_size=2 * page),
    "of others": lambda size, page: Unnamed(size),
    "misnamed": lambda size, page: Misnamed(size),
    "shifted": lambda size, page: Shifted(size),
    "derived": lambda size, page: Derived(shard_size=size, page_size=page),
    "pages of others": Pages,
}


@st.composite
def batches(draw):
    """Draw a placement, block tables, lengths, and the rows that attend."""
    size = draw(st.integers(1, 5))
    page = draw(st.sampled_from([2, 4, 6, 8, 32]))
    name = draw(st.sampled_from(sorted(PLACEMENTS_AND_OTHERS)))
    placement = PLACEMENTS_AND_OTHERS[name](size, page)
    lens = np.array(draw(st.lists(st.integers(0, 40), min_size=1, max_size=4)))
    counts = -(-lens // page)
    order = draw(st.permutations(range(int(counts.sum()) + 2)))
    tables = np.full((len(lens), max(int(counts.max()), 1)), -1, np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = order[: counts.sum()]
    pairs = [(s, p) for s, n in enumerate(lens) for p in range(n)]
    rows = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    request, position = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return placement, page, tables, lens, Rows(request, position)


def keys_by_hand(batch, rank):
    """List for each request the (position, row of the rank's pool) of keys that the rank holds."""
    placement, page, tables, lens, _ = batch
    keys = []
    for s, n in enumerate(lens):
        slots = [int(tables[s, p // page]) * page + p % page for p in range(n)]
        owners = placement.owner_of(np.array(slots, dtype=np.int64))
        local = placement.local_index(np.array(slots, dtype=np.int64))
        keys.append([(p, int(local[p])) for p in range(n) if owners[p] == rank])
    return keys


@given(
    batches(),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 50)),
    st.one_of(st.none(), st.integers(0, 2**32)),
)
def test_calls_show_each_row_what_it_sees_and_nothing_else(batch, causal, window, seed):
    placement, page, tables, lens, rows = batch
    causal = causal or window is not None
    shares = key_shares(placement, tables, lens, page)
    mask, flags = None, [np.ones((n, n), bool) for n in lens]
    if seed is not None:
        flags = [np.random.default_rng(seed).random((n, n)) < 0.5 for n in lens]
        packed = [np.packbits(x, bitorder="little") for x in flags]
        ends = np.cumsum([len(x) for x in packed])
        first_byte = np.append(0, ends[:-1])
        mask = RowMask(np.concatenate(packed), first_byte, lens, np.zeros_like(lens))
    for rank in range(placement.shard_size):
        keys = keys_by_hand(batch, rank)
        expected = [
            {
                row
                for p, row in keys[s]
                if (not causal or p <= at)
                and (window is None or p >= at - window)
                and flags[s][at, p]
            }
            for s, at in zip(rows.request, rows.position, strict=True)
        ]
        seen = [set() for _ in expected]
        times = np.zeros(len(expected), int)
        pages = shares.local_pages(rank)
        call = sequence_call(shares, rank, pages, rows, Visibility(causal, window, mask))
        for row, visible in visible_rows(call) if call else ():
            seen[row] |= visible
            times[row] += 1
        assert seen == expected
        assert times.max(initial=0) <= 1


def visible_rows(call):
    """Yield the keys that `paged_attention` shows each row of a call: (row, rows of the pool)."""
    begin, byte = 0, 0
    for i, n in enumerate(call.q_lens):
        ids = call.kv_indices[call.kv_indptr[i] : call.kv_indptr[i + 1]]
        length = (len(ids) - 1) * call.page_size + int(call.last_page_len[i])
        slots = (ids[:, None] * call.page_size + np.arange(call.page_size)).ravel()[:length]
        if call.packed_custom_mask is None:
            first, last = call.key_ranges.reshape(-1, 2)[begin : begin + n].T[:, :, None]
            visible = (first <= np.arange(length)) & (np.arange(length) < last)
        else:
            num_bytes = -(-n * length // 8)
            bits = call.packed_custom_mask[byte : byte + num_bytes]
            visible = np.unpackbits(bits, count=n * length, bitorder="little") > 0
            visible = visible.reshape(n, length)
            byte += num_bytes
        for j in range(n):
            yield int(call.rows[begin + j]), set(slots[visible[j]].tolist())
        begin += n
    assert begin == len(call.rows)


@given(st.integers(1, 9))
def test_in_a_ring_every_rank_has_every_share_from_its_neighbour(size):
    schedules = [ring_schedule(rank, size) for rank in range(size)]
    for rank, schedule in enumerate(schedules):
        assert sorted(schedule) == list(range(size))
        assert schedule[0] == rank
        assert schedule[1:] == schedules[rank - 1][:-1]


def test_placements_of_others_are_compared_by_where_they_put_a_batch():
    """Each rank has its own object, whose repr may be an address, or equal that of another."""

    def terms_of(placement):
        cp = first_of(2, 4, placement=placement)
        step = cp.plan_decode([9], block_tables=[[1, 0, 2]])
        return cp.plan([9], block_tables=[[1, 0, 2]]).terms, step.terms

    assert terms_of(Unnamed(2)) == terms_of(Unnamed(2)) == terms_of(Misnamed(2))
    swapped = Misnamed(2)
    swapped.owner_of = lambda slots: 1 - slots % 2
    for other in (PLACEMENTS["pages"](2, 4), swapped):
        for ours, others in zip(terms_of(Misnamed(2)), terms_of(other), strict=True):
            assert ours[:-1] == others[:-1]
            assert ours[-1] != others[-1]


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"owner_of": lambda slots: slots % 3}, ValueError, "must return ranks from 0 to 1"),
        ({"owner_of": lambda slots: slots - 9}, ValueError, "must return ranks from 0 to 1"),
        ({"local_index": lambda slots: slots - 99}, ValueError, "rows from 0 on, got -"),
        ({"local_index": lambda slots: slots / 2}, TypeError, "integer for each slot.* float64"),
        ({"owner_of": lambda slots: 0}, TypeError, "owner_of must return an integer for"),
    ],
)
def test_answers_of_placements_are_checked(answers, error, message):
    placement = Unnamed(2)
    vars(placement).update(answers)
    cp = first_of(2, 4, placement=placement)
    with pytest.raises(error, match=message):
        cp.plan([9], [9], block_tables=[[1, 0, 2]])
