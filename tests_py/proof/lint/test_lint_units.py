# SPDX-License-Identifier: Apache-2.0
"""Documents of units made of several rows: right halos are proved, damaged ones refuted."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn.context_parallel.halo import plan_halo
from cpattn_proof import lint
from cpattn_proof.linting.adapters.units import from_halos
from support.proof.plans import kinds

EXTEND, PREFIX, RULE = [30, 9], [6, 0], {"window": 8, "ratio": 4}


def planned(extend=EXTEND, prefix=PREFIX, cp_size=3, rule=RULE, **options):
    lens = [new + old for new, old in zip(extend, prefix, strict=True)]
    plans = cpattn.build_cp_metadata_all_ranks(extend, lens, cp_size=cp_size, **options)
    return plans, [plan_halo(plan, **rule) for plan in plans]


def document_of(plans, halos):
    return from_halos(plans, halos, EXTEND, PREFIX, **RULE)


lens = st.integers(0, 40)


@given(
    st.lists(st.tuples(lens, lens), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 6),
    st.integers(0, 9), st.sampled_from(["zigzag", "contiguous"]),
)  # fmt: skip
def test_halos_are_proved(requests, cp_size, ratio, more, strategy):
    extend, prefix = map(list, zip(*requests, strict=True))
    rule = {"window": ratio + more, "ratio": ratio}
    plans, halos = planned(extend, prefix, cp_size, rule, strategy=strategy)
    report = lint(from_halos(plans, halos, extend, prefix, **rule))
    assert report.findings == ()


def test_a_rank_that_sends_other_rows_is_found():
    """Units are refuted where their rows are received, by what lies there."""
    plans, halos = planned(strategy="contiguous")
    halos[0] = halos[0]._replace(send_indices=halos[0].send_indices - 1)
    (found,) = lint(document_of(plans, halos)).findings
    assert found.kind == "cov-unit"
    assert found.ranks == (1,)
    assert "of rows 11 to 14, 16 to 19, not 12 to 19" in found.what
    assert found.where == "request 0, unit 4"


def test_an_overlap_that_is_lost_is_found():
    """A compressor that begins with the rows of its own rank alone, as an engine's did."""
    plans, halos = planned(strategy="contiguous")
    short = [halo._replace(unit_lens=halo.unit_lens.clip(max=4)) for halo in halos]
    assert kinds(document_of(plans, short)) == {"cov-unit"}


def test_a_unit_that_nobody_or_two_ranks_compute_is_found():
    document = document_of(*planned())
    first, last = (document["ranks"][rank]["units"] for rank in (0, 2))
    for name, column in last.items():
        column.append(first[name][0])
    (found,) = lint(document).findings
    assert (found.kind, found.ranks) == ("own-unit", (0, 2))
    for name, column in last.items():
        column.pop()
        first[name].pop(0)
    (found,) = lint(document).findings
    assert found.kind == "own-unit"
    assert "is computed by no rank, not 1" in found.what


def test_a_unit_that_is_not_complete_is_found():
    document = document_of(*planned())
    document["ranks"][0]["units"]["unit"][-1] = 99
    (found, *_) = lint(document).findings
    assert found.what.startswith("rank 0 computes unit 99 of request")
    assert kinds(found.details["smaller"]) >= {"own-unit"}


def test_units_of_other_code_need_the_fields_alone():
    plans, halos = planned()
    objects = [SimpleNamespace(**halo._asdict()) for halo in halos]
    assert document_of(plans, objects) == document_of(plans, halos)
