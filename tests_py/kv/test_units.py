# SPDX-License-Identifier: Apache-2.0
"""Compressed units in the pools of simulated ranks, against where each has to be."""

import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from cpattn.context_parallel.halo import plan_halo
from cpattn.context_parallel.vllm_0_32 import build_pcp_layout
from cpattn.kv import PageInterleave, TokenInterleave, plan_units
from cpattn_proof import NotUsable, lint
from cpattn_proof.linting.adapters.units import from_unit_writes
from support.examples import examples

BATCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=4)


def ranks_of(batch, cp_size, strategy):
    """Return what plans are made of on each rank."""
    new, old = zip(*batch, strict=True)
    if strategy == "layout":
        layout = build_pcp_layout(new, old, pcp_size=cp_size, shard_decode=False)
        return [{"metadata": layout, "rank": rank} for rank in range(cp_size)]
    lens = [sum(pair) for pair in batch]
    options = {"cp_size": cp_size, "strategy": strategy}
    return [{"metadata": x} for x in cpattn.build_cp_metadata_all_ranks(new, lens, **options)]


def pools_of(halos, plans):
    """Return for each rank the unit in each slot, as (request, unit), after the exchange."""
    units = [np.stack([halo.unit_request, halo.unit_ids], axis=1) for halo in halos]
    parts = [
        np.split(own[plan.send_indices], np.cumsum(plan.send_counts)[:-1])
        for plan, own in zip(plans, units, strict=True)
    ]
    for to, plan in enumerate(plans):
        assert [len(part[to]) for part in parts] == plan.recv_counts
        came = np.concatenate([part[to] for part in parts])
        yield dict(zip(plan.recv_indices.tolist(), map(tuple, came.tolist()), strict=True))


def planned(batch, ranks, ratio, page_size, sharing, random):
    """Return halos, plans, tables, the placement, and what each pool has to have afterwards."""
    size, bs = len(ranks), len(batch)
    halos = [plan_halo(window=2 * ratio, ratio=ratio, **one) for one in ranks]
    tables = [random.permutation(bs * 70).reshape(bs, 70) for _ in ranks]
    placement = None
    if sharing == "units":
        placement = TokenInterleave(shard_size=size, interleave=int(random.integers(1, 5)))
    elif sharing == "pages":
        placement = PageInterleave(shard_size=size, page_size=page_size)
        tables = [tables[0]] * size
    plans = [
        plan_units(ratio=ratio, block_tables=table, page_size=page_size, placement=placement, **one)
        for one, table in zip(ranks, tables, strict=True)
    ]
    pools = [{} for _ in ranks]
    for request, (new, old) in enumerate(batch):
        for unit in range(old // ratio, (new + old) // ratio):
            for rank, pool in enumerate(pools):
                n = unit
                if sharing == "units":
                    run, into = divmod(unit, placement.interleave)
                    n = run // size * placement.interleave + into
                    if run % size != rank:
                        continue
                page, into = tables[rank][request, n // page_size], n % page_size
                if sharing == "pages":
                    if page % size != rank:
                        continue
                    page //= size
                pool[int(page * page_size + into)] = (request, unit)
    return halos, plans, tables, placement, pools


@settings(max_examples=examples(150), deadline=None)
@given(
    BATCHES, st.integers(1, 5), st.integers(1, 6), st.integers(1, 4),
    st.sampled_from(["zigzag", "interleave", "contiguous", "layout"]),
    st.sampled_from([None, "units", "pages"]), st.integers(0, 99),
)  # fmt: skip
def test_every_unit_is_in_the_slot_of_its_owner(
    batch, size, ratio, page_size, strategy, sharing, seed
):
    ranks, random = ranks_of(batch, size, strategy), np.random.default_rng(seed)
    made = planned(batch, ranks, ratio, page_size, sharing, random)
    halos, plans, tables, placement, pools = made
    assert list(pools_of(halos, plans)) == pools
    new, old = zip(*batch, strict=True)
    report = lint(
        from_unit_writes(
            halos, plans, new, old, ratio=ratio, block_tables=tables, page_size=page_size,
            placement=placement,
        )
    )  # fmt: skip
    assert report.findings == ()


def test_documents_of_damaged_writes_are_refuted():
    batch = [(30, 6), (17, 0)]
    for sharing in (None, "units", "pages"):
        ranks = ranks_of(batch, 2, "zigzag")
        made = planned(batch, ranks, 4, 2, sharing, np.random.default_rng(0))
        halos, plans, tables, placement, _ = made
        document = partial(
            from_unit_writes, extend_lens=[30, 17], prefix_lens=[6, 0], ratio=4,
            block_tables=tables, page_size=2, placement=placement, num_pages=140,
        )  # fmt: skip
        assert lint(document(halos, plans)).proved
        swapped = [plans[0]._replace(recv_indices=np.roll(plans[0].recv_indices, 1)), plans[1]]
        (found,) = lint(document(halos, swapped)).findings
        assert (found.kind, found.ranks[:1]) == ("own-slot", (0,))
        other = [plans[0]._replace(send_indices=plans[0].send_indices * 0), plans[1]]
        assert {one.kind for one in lint(document(halos, other)).findings} == {"own-slot"}
        lost = [plans[0]._replace(recv_indices=plans[0].recv_indices[:-1]), plans[1]]
        for damaged, message in [
            (lost, "rank 0 receives"),
            (
                [plans[0]._replace(send_indices=plans[0].send_indices - 1), plans[1]],
                "beyond the 6 ",
            ),
            ([plans[0]._replace(send_counts=[1]), plans[1]], "send_counts of rank 0 must be of 2 "),
            (plans[:1], r"of as many ranks, got \[2, 1, 2\]"),
        ]:
            with pytest.raises(NotUsable, match=message):
                document(halos, damaged)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"placement": 3},
            TypeError,
            "placement must be of type TokenInterleave or PageInterleave",
        ),
        ({"metadata": 3}, TypeError, "metadata must be of type ContextParallelMetadata, got"),
        ({"rank": 1}, ValueError, "rank must be that of metadata, 0, or None, got 1"),
    ],
)
def test_errors_of_units(changes, error, message):
    metadata = cpattn.build_cp_metadata([8], cp_rank=0, cp_size=2)
    arguments = {"metadata": metadata, "ratio": 4, "block_tables": [[0, 1]], "page_size": 1}
    with pytest.raises(error, match=re.escape(f"plan_units: {message}")):
        plan_units(**arguments | changes)
