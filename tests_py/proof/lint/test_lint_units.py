# SPDX-License-Identifier: Apache-2.0
"""Right documents of halos, relayouts and prefill context parallelism are proved; damaged ones
refuted."""

from types import SimpleNamespace

import numpy as np
import pytest

import cpattn
from cpattn.context_parallel.halo import plan_halo, plan_relayout
from cpattn.context_parallel.vllm_0_32 import build_pcp_layout
from cpattn_proof import NotUsable, lint
from cpattn_proof.linting.adapters.pcp import from_segments
from cpattn_proof.linting.adapters.relayouts import from_relayouts
from cpattn_proof.linting.adapters.units import from_halos
from support.proof.plans import kinds, segments_of_vllm

EXTEND, PREFIX, RULE = [30, 9], [6, 0], {"window": 8, "ratio": 4}


def planned(extend=EXTEND, prefix=PREFIX, cp_size=3, rule=RULE, **options):
    lens = [new + old for new, old in zip(extend, prefix, strict=True)]
    plans = cpattn.build_cp_metadata_all_ranks(extend, lens, cp_size=cp_size, **options)
    return plans, [plan_halo(plan, **rule) for plan in plans]


def document_of(plans, halos):
    return from_halos(plans, halos, EXTEND, PREFIX, **RULE)


def test_halos_of_a_layout_are_proved_on_all_ranks_that_have_a_request():
    layout = build_pcp_layout([3, *EXTEND], [5, *PREFIX], pcp_size=3, dcp_size=3)
    halos = [plan_halo(layout, rank=rank, **RULE) for rank in range(3)]
    document = from_halos(layout, halos, [3, *EXTEND], [5, *PREFIX], **RULE)
    assert lint(document).proved
    for column in document["ranks"][1]["units"].values():
        del column[0]  # a unit of the first request, which all ranks have
    (found,) = lint(document).findings
    assert found.what == "unit 1 of request 0 is computed by 2 ranks, not 3"


def test_a_rank_that_sends_other_rows_is_found():
    """The unit that receives the rows is refuted, by the rows that it gets."""
    plans, halos = planned(strategy="contiguous")
    halos[0] = halos[0]._replace(send_indices=halos[0].send_indices - 1)
    (found,) = lint(document_of(plans, halos)).findings
    assert found.kind == "cov-unit"
    assert found.ranks == (1,)
    assert "of rows 11 to 14, 16 to 19, not 12 to 19" in found.what
    assert found.where == "request 0, unit 4"


def test_an_overlap_that_is_lost_is_found():
    """A compressor that begins with the rows of its own rank alone is wrong; an engine's was."""
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


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"send_indices": [1, 0, *range(2, 7)]}, "cov-pair"),
        ({"send_counts": [3, 4]}, "seq-size"),
        ({"recv_indices": [0, 0, *range(2, 7)]}, "own-token"),
    ],
)
def test_rows_that_go_astray_are_found(fault, kind):
    source, target = (
        cpattn.build_cp_metadata_all_ranks([14], [17], cp_size=2, strategy=strategy)
        for strategy in ("contiguous", "zigzag")
    )
    plans = [plan_relayout(*pair) for pair in zip(source, target, strict=True)]
    plans[0] = plans[0]._replace(**{name: np.array(value) for name, value in fault.items()})
    found = lint(from_relayouts(plans, source, target, [14], [3])).findings
    assert kind in [one.kind for one in found], found


NEW, CACHED = [9, 1, 3], [0, 5, 2]  # a prefill, a decode, a short prefill


def gathered(layout):
    return {
        "hidden_restore_idx": layout.hidden_restore_idx,
        "padded_gather_idx": layout.padded_gather_idx,
        "gathered_slots": np.where(
            layout.gathered_kv_write_mask, layout.padded_gather_idx + 7, -1
        ),
    }  # fmt: skip


def test_objects_of_an_engine_are_the_same_document():
    layout = build_pcp_layout(NEW, CACHED, pcp_size=2)
    objects = segments_of_vllm(layout.segments)
    expected = from_segments(layout.segments, NEW, CACHED)
    assert from_segments(objects, NEW, CACHED) == expected
    assert [request["queries"] for request in expected["requests"]] == ["split"] * 3
    assert from_segments([[], *objects], NEW, CACHED)["ranks"][0]["rows"]["count"] == []


@pytest.mark.parametrize("options", [{"shard_decode": False}, {"dcp_size": 2}])
def test_faults_of_replicated_requests(options):
    layout = build_pcp_layout(NEW, CACHED, pcp_size=2, **options)
    keys = [lens.copy() for lens in layout.seq_lens]
    keys[1][0] -= 1  # a key of the decode, on the other rank
    assert kinds(from_segments(layout.segments, NEW, CACHED, seq_lens=keys)) == {"cov-pair"}
    segments = list(layout.segments)
    segments[1] = [column[1:] for column in segments[1]]
    rows = segments[1]
    rows[3], rows[4] = rows[3] - 1, rows[4] - 1
    assert "own-token" in kinds(from_segments(segments, NEW, CACHED, replicated=layout.replicated))


def test_faults_of_what_is_gathered():
    layout = build_pcp_layout(NEW, CACHED, pcp_size=2, shard_decode=False)
    given = gathered(layout)
    second = given | {"gathered_slots": layout.padded_gather_idx + 7}  # ignores the mask
    assert kinds(from_segments(layout.segments, NEW, CACHED, **second)) == {"own-slot"}
    swapped = given | {"hidden_restore_idx": given["hidden_restore_idx"][::-1]}
    assert kinds(from_segments(layout.segments, NEW, CACHED, **swapped)) == {"own-restore"}
    for wrong in (None, np.zeros(5, int)):
        with pytest.raises(NotUsable, match="as many rows of each of 2 ranks"):
            from_segments(layout.segments, NEW, CACHED, gathered_slots=[1], padded_gather_idx=wrong)
