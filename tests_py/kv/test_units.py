# SPDX-License-Identifier: Apache-2.0
"""Compressed units in the pools of ranks: damaged plans are refuted; tests that lint plans of
`support.proof.random_plans` prove random correct ones."""

from functools import partial

import numpy as np
import pytest

import cpattn
from cpattn.context_parallel.halo import plan_halo
from cpattn.kv import PageInterleave, TokenInterleave, plan_units
from cpattn_proof import NotUsable, lint
from cpattn_proof.linting.adapters.units import from_unit_writes


@pytest.mark.parametrize(
    "placement",
    [None, TokenInterleave(shard_size=2, interleave=3), PageInterleave(shard_size=2, page_size=2)],
)
def test_documents_of_damaged_writes_are_refuted(placement):
    ranks = cpattn.build_cp_metadata_all_ranks([30, 17], [36, 17], cp_size=2)
    halos = [plan_halo(one, window=8, ratio=4) for one in ranks]
    tables = np.random.default_rng(0).permutation(40).reshape(2, 20)
    given = {"ratio": 4, "page_size": 2, "placement": placement}
    plans = [plan_units(one, block_tables=tables, **given) for one in ranks]
    given |= {"extend_lens": [30, 17], "prefix_lens": [6, 0], "num_pages": 40}
    document = partial(from_unit_writes, block_tables=[tables] * 2, **given)
    assert lint(document(halos, plans)).proved
    first = plans[0]

    def damaged(**fields):
        return [first._replace(**fields), plans[1]]

    (found,) = lint(document(halos, damaged(recv_indices=np.roll(first.recv_indices, 1)))).findings
    assert (found.kind, found.ranks[:1]) == ("own-slot", (0,))
    other = lint(document(halos, damaged(send_indices=first.send_indices * 0)))
    assert {one.kind for one in other.findings} == {"own-slot"}
    for wrong, message in [
        (damaged(recv_indices=first.recv_indices[:-1]), "rank 0 receives .* slots"),
        (damaged(recv_counts=[0, 0]), "rank 0 receives .*, awaits"),
        (damaged(send_indices=first.send_indices - 1), "beyond the 6 "),
        (damaged(send_counts=[1]), "send_counts of rank 0 must be of 2 "),
        (plans[:1], r"of as many ranks, got \[2, 1, 2\]"),
    ]:
        with pytest.raises(NotUsable, match=message):
            document(halos, wrong)


def test_placements_are_of_units_or_pages():
    metadata = cpattn.build_cp_metadata([8], cp_rank=0, cp_size=2)
    with pytest.raises(TypeError, match="plan_units: placement must be of type TokenInterleave or"):
        plan_units(metadata, ratio=4, block_tables=[[0, 1]], page_size=1, placement=3)
