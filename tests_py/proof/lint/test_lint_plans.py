# SPDX-License-Identifier: Apache-2.0
"""Right plans of cpattn are proved, and each kind of damage is refuted by its invariant."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema")

from cpattn.proof import lint
from support.proof.plans import batches, document_of, kinds, with_cache

DECIDED = {"OWN", "COV", "LEN", "PAD", "ADDR"}


@settings(max_examples=1000, deadline=None)
@given(batches())
def test_right_plans_are_proved(batch):
    report = lint(with_cache(document_of(*batch)))
    assert report.findings == ()
    assert set(report.checked) >= DECIDED


@settings(max_examples=200, deadline=None)
@given(batches(), st.data())
def test_any_lost_or_doubled_row_is_found(batch, data):
    document = document_of(*batch)
    ranks = [r for r in document["ranks"] if sum(r["rows"]["count"])]
    if not ranks:
        return
    rank = data.draw(st.sampled_from(ranks))
    runs = [i for i, count in enumerate(rank["rows"]["count"]) if count]
    run = data.draw(st.sampled_from(runs))
    rank["rows"]["count"][run] += data.draw(st.sampled_from([-1, 1]))
    report = lint(document, shrink=False)
    assert {"own-token"} <= {found.kind for found in report.findings}
    assert report.exit_code == 1


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(-3, 3).filter(bool), st.data())
def test_any_wrong_length_is_found(batch, change, data):
    """One call sees keys too many or too few: some query does, or the cache has not so many."""
    document = document_of(*batch)
    calls = [r["segments"] for r in document["ranks"] if r["segments"]["rows"]]
    if not calls:
        return
    segments = data.draw(st.sampled_from(calls))
    call = data.draw(st.integers(0, len(segments["keys"]) - 1))
    segments["keys"][call] += change
    found = {one.invariant for one in lint(document, shrink=False).findings}
    assert "COV" in found
    assert found <= {"COV", "LEN"}


BATCH = ([13, 40], [0, 64], 4)


def drop_token(document):
    document["ranks"][1]["rows"]["count"][0] -= 1


def swap_owners(document):
    one, two = (document["ranks"][rank]["rows"]["position"] for rank in (0, 1))
    one[0], two[0] = two[0], one[0]


def swap_blocks_of_different_sizes(document):
    one, two = (document["ranks"][rank]["rows"]["position"] for rank in (0, 1))
    one[1], two[0] = two[0], one[1]


def take_wrong_positions(document):
    rows = deepcopy(document["ranks"][2]["rows"])
    rows["position"][0] += 1
    document["ranks"][2]["positions"] = {k: v for k, v in rows.items() if k != "request"}


def restore_in_another_order(document):
    restore = document["restore"]
    for column in restore.values():
        column[0], column[1] = column[1], column[0]


def restore_rows_that_are_not_there(document):
    document["restore"]["row"][-1] += 100


def take_rows_of_another_request(document):
    document["ranks"][0]["segments"]["request"][0] = 1


def see_too_few_keys(document):
    document["ranks"][3]["segments"]["keys"][1] -= 1


def see_later_keys(document):
    document["ranks"][3]["segments"]["keys"][0] += 1


def call_twice(document):
    for column in document["ranks"][0]["segments"].values():
        column.append(column[0])


def read_beyond_the_sequence(document):
    document["ranks"][0]["segments"]["keys"][3] += 1


def take_rows_that_are_not_there(document):
    document["ranks"][0]["segments"]["rows"][-1] += 1


def have_short_tables(document):
    document["cache"]["tables"][1].pop()


def have_pages_that_are_not_there(document):
    document["cache"]["tables"][1][2] = document["cache"]["num_pages"]


def share_a_page(document):
    document["cache"]["tables"][1][20] = document["cache"]["tables"][0][0]


def write_to_another_slot(document):
    writes = document["ranks"][1]["writes"]["slot"]
    writes[0], writes[1] = writes[1], writes[0]


def write_twice_to_a_slot(document):
    writes = document["ranks"][1]["writes"]["slot"]
    writes[0] = writes[1]


def forget_to_write(document):
    for column in document["ranks"][2]["writes"].values():
        column.pop()


def write_outside(document):
    document["ranks"][2]["writes"]["slot"][0] = 10_000


def write_padding_to_a_page(document):
    for name, value in {"request": -1, "position": 0, "count": 1, "slot": 9}.items():
        document["ranks"][2]["writes"][name].append(value)


def compute_padding(document):
    rows = document["ranks"][0]["rows"]
    rows["request"][-1] = -1


DAMAGE = {
    drop_token: "own-token",
    swap_owners: "own-restore",
    swap_blocks_of_different_sizes: "own-token",
    take_wrong_positions: "own-position",
    restore_in_another_order: "own-restore",
    restore_rows_that_are_not_there: "own-restore",
    take_rows_of_another_request: "own-rows",
    see_too_few_keys: "cov-pair",
    see_later_keys: "cov-pair",
    call_twice: "cov-pair",
    read_beyond_the_sequence: "len-keys",
    take_rows_that_are_not_there: "len-rows",
    have_short_tables: "len-pages",
    have_pages_that_are_not_there: "len-pages",
    share_a_page: "len-pages",
    write_to_another_slot: "own-slot",
    write_twice_to_a_slot: "own-slot",
    forget_to_write: "own-slot",
    write_outside: "addr-slot",
    write_padding_to_a_page: "pad-slot",
    compute_padding: "pad-rows",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_refuted_by_its_invariant(damage):
    kind = DAMAGE[damage]
    document = with_cache(document_of(*BATCH))
    assert kinds(document) == set()
    damage(document)
    report = lint(document)
    found = {one.kind: one for one in report.findings}
    assert kind in found
    smaller = found[kind].details["smaller"]
    assert kind in kinds(smaller)
    sizes = [sum(len(str(part)) for part in one.values()) for one in (smaller, document)]
    assert sizes[0] < sizes[1]


def test_the_balance_is_that_of_pairs():
    zigzag, contiguous = (document_of([256], [0], 8, cut) for cut in ("zigzag", "contiguous"))
    bound = {"balance": {"bound": 1.2}}
    assert kinds(zigzag | bound) == set()
    (found,) = lint(contiguous | bound, shrink=False).findings
    assert found.invariant == "BAL"
    assert found.ranks == (7,)
    assert found.details["pairs"] == sum(range(225, 257))


def test_the_balance_is_of_pairs_within_the_window():
    contiguous = document_of([256], [7], 8, "contiguous") | {"attention": {"window": 4}}
    assert kinds(contiguous | {"balance": {"bound": 1}}) == set()
    contiguous["attention"]["window"] = 200
    (found,) = lint(contiguous | {"balance": {"bound": 1}}, shrink=False).findings
    assert found.details["pairs"] == 32 * 201
    seen = [min(position + 1, 201) for position in range(7, 263)]
    assert found.details["mean"] == sum(seen) / 8


def test_windows_and_attention_without_a_mask():
    """Windows hide keys from both, the plan and what is wanted; without a mask all see all."""
    document = document_of([13, 5], [3, 0], 2)
    assert kinds(document | {"attention": {"window": 4}}) == set()
    document["ranks"][0]["segments"]["keys"][0] -= 1
    assert kinds(document | {"attention": {"window": 4}}) == {"cov-pair"}
    whole = {
        "schema": "cpattn-plan/1",
        "requests": [{"extend": 6}],
        "attention": {"causal": False},
        "ranks": [
            {
                "rows": {"request": [0], "position": [first], "count": [3]},
                "segments": {"request": [0], "row": [0], "rows": [3], "keys": [6], "step": [0]},
            }
            for first in (0, 3)
        ],
    }
    assert kinds(whole) == set()
    windowed = lint(whole | {"attention": {"causal": False, "window": 2}})
    assert windowed.proved
    assert "segments: windows are judged under a causal mask" in windowed.not_checked["COV"]
    whole["ranks"][1]["segments"]["step"] = [1]
    assert kinds(whole) == {"cov-pair"}


def test_a_finding_says_where_and_draws_it():
    document = document_of(*BATCH)
    drop_token(document)
    found = lint(document).findings[0]
    assert found.what == "position 3 of request 0 is on no rank, not 1"
    assert found.where == "request 0, position 3"
    assert found.picture.splitlines()[0] == "rank 0  ##..........#  0-1 12"
    assert found.picture.splitlines()[-1].split() == ["^", "3"]
    assert found.details["request"] == 0


def test_a_query_that_misses_keys_is_drawn_with_what_it_sees():
    document = document_of(*BATCH)
    see_too_few_keys(document)
    (found,) = (one for one in lint(document).findings if one.invariant == "COV")
    assert found.where.startswith("request 1, query 79, key")
    assert found.ranks == (3,)
    assert "rank 3 sees" in found.picture
