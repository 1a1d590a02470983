# SPDX-License-Identifier: Apache-2.0
"""Right plans of cpattn are proved, also when cut; each damage is refuted by its invariant."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn_proof import NotUsable, lint
from cpattn_proof.linting import linter, shrinking
from cpattn_proof.linting.shrinking import cut, without
from support.proof.plans import batches, document_of, kinds, with_cache
from support.proof.random_plans import KINDS, alarm_of


def test_random_plans_of_every_kind_raise_no_finding():
    assert [alarm for number in range(20 * len(KINDS)) if (alarm := alarm_of(1, number))] == []


BATCH = ([13, 40], [0, 64], 4)


def swap(one, i, other, j):
    one[i], other[j] = other[j], one[i]


def later(rows):
    first, *rest = rows.position
    return {"position": [first + 1, *rest], "count": list(rows.count)}


def damage(document, statement):
    ranks = document["ranks"]
    names = ("rows", "segments", "writes")
    tables = {name: [SimpleNamespace(**rank[name]) for rank in ranks] for name in names}
    exec(statement, dict(document) | tables | {"swap": swap, "later": later})


DAMAGE = {
    "rows[1].count[0] -= 1": "own-token",
    "rows[1].count[0] += 1": "own-token",  # two ranks have the token
    "swap(rows[0].position, 0, rows[1].position, 0)": "own-restore",
    "swap(rows[0].position, 1, rows[1].position, 0)": "own-token",  # the sizes differ
    "ranks[2]['positions'] = later(rows[2])": "own-position",
    "for column in restore.values(): column[:2] = column[1::-1]": "own-restore",
    "restore['row'][-1] += 100": "own-restore",  # these rows do not exist
    "segments[0].request[0] = 1": "own-rows",  # these belong to another request
    "segments[3].keys[1] -= 1": "cov-pair",
    "segments[3].keys[0] += 1": "cov-pair",  # a row sees a later key
    "for column in ranks[0]['segments'].values(): column.append(column[0])": "cov-pair",
    "segments[0].keys[3] += 1": "len-keys",  # the sequence is shorter
    "segments[0].rows[-1] += 1": "len-rows",  # this row does not exist
    "cache['tables'][1].pop()": "len-pages",
    "cache['tables'][1][2] = cache['num_pages']": "len-pages",
    "cache['tables'][1][20] = cache['tables'][0][0]": "len-pages",  # two requests have one page
    "writes[1].slot[:2] = writes[1].slot[1::-1]": "own-slot",
    "writes[1].slot[0] = writes[1].slot[1]": "own-slot",  # a slot is written twice
    "for column in ranks[2]['writes'].values(): column.pop()": "own-slot",  # a write is missing
    "writes[2].slot[0] = 10_000": "addr-slot",
    "list(map(list.append, ranks[2]['writes'].values(), (-1, 0, 1, 9)))": "pad-slot",
    "rows[0].request[-1] = -1": "pad-rows",  # a rank computes padding
}


@pytest.mark.parametrize("statement", DAMAGE)
def test_damage_is_refuted_by_its_invariant(statement):
    document, kind = with_cache(document_of(*BATCH)), DAMAGE[statement]
    assert kinds(document) == set()
    damage(document, statement)
    found = {one.kind: one for one in lint(document).findings}
    assert kind in found
    smaller = found[kind].details["smaller"]
    assert kind in kinds(smaller)
    sizes = [sum(len(str(part)) for part in one.values()) for one in (smaller, document)]
    assert sizes[0] < sizes[1]


def test_the_balance_may_go_by_weights():
    document = document_of([256], [0], 4, "contiguous")
    fair = [float(sum(range(64 * rank + 1, 64 * rank + 65))) for rank in range(4)]
    assert kinds(document | {"balance": {"bound": 1.01, "weights": fair}}) == set()
    (found,) = lint(document | {"balance": {"bound": 1.01, "weights": [1, 2, 3, 3]}}).findings
    assert found.ranks == (3,)
    assert "times its share; the bound is 1.01" in found.what
    for weights in ([1, 2, 3], [1, 2, 3, 0]):
        with pytest.raises(NotUsable, match=r"balance.weights: must be above 0, one for each of 4"):
            lint(document | {"balance": {"bound": 1.01, "weights": weights}})


def test_a_finding_says_where_and_draws_it():
    document = document_of(*BATCH)
    document["ranks"][1]["rows"]["count"][0] -= 1
    found = lint(document).findings[0]
    assert found.what == "position 3 of request 0 is on no rank, not 1"
    assert found.where == "request 0, position 3"
    assert found.picture.splitlines()[0] == "rank 0  ##..........#  0-1 12"
    assert found.picture.splitlines()[-1].split() == ["^", "3"]
    assert found.details["request"] == 0
    document = document_of(*BATCH)
    document["ranks"][3]["segments"]["keys"][1] -= 1
    (found,) = (one for one in lint(document).findings if one.invariant == "COV")
    assert found.where.startswith("request 1, query 79, key")
    assert found.ranks == (3,)
    assert "rank 3 sees" in found.picture  # the picture shows its fault


@given(batches(), st.data())
def test_a_right_plan_is_right_without_some_requests_and_with_shorter_ones(batch, data):
    document, count = document_of(*batch), len(batch[0])
    dropped = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    small = without(with_cache(document), dropped)
    assert len(small["requests"]) == count - len(dropped)
    assert lint(small).findings == ()
    document.pop("restore", None)
    request = data.draw(st.integers(0, count - 1))
    length = data.draw(st.integers(0, batch[0][request]))
    small = cut(document, request, length)
    assert small["requests"][request]["extend"] == length
    assert lint(small).findings == ()


def test_parts_that_cannot_be_cut_are_left_whole():
    document = document_of([8], [0], 2)
    assert cut(document, 0, 4) is None  # the cut would change how rows are restored
    document.pop("restore")
    assert cut(with_cache(document), 0, 4) is None
    assert cut(document, 0, 4) is not None


def test_the_seconds_of_a_report_are_those_of_all_that_it_took(monkeypatch):
    clock = [0.0]

    def shrunk(document, *_):
        clock[0] += 5
        return document

    monkeypatch.setattr(linter, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(linter.shrinking, "shrunk", shrunk)
    document = document_of(*BATCH)
    document["ranks"][1]["rows"]["count"][0] -= 1
    report = lint(document)
    assert report.seconds == 5 * len(report.findings) > 0


def test_large_documents_are_made_smaller_in_few_tries(monkeypatch):
    """The work to judge a document bounds the number of tries before one is made."""
    made = []
    real = shrinking.without
    monkeypatch.setattr(shrinking, "without", lambda *args: made.append(args) or real(*args))
    runs = {"request": [0, 1], "position": [0, 0], "count": [2**22, 2**22], "step": [1, 2]}
    requests = [{"extend": 2**22}] * 2
    document = {"schema": "cpattn-plan/1", "requests": requests, "ranks": [{"rows": runs}] * 8}
    assert lint(document).findings
    assert made == []
    document["requests"] = [{"extend": 8}] * 2
    document["ranks"] = [{"rows": runs | {"count": [8, 8]}}] * 2
    assert len(lint(document).findings[0].details["smaller"]["requests"]) == 1
    assert made


def test_smaller_documents_are_of_the_schema():
    """A smaller document has no ranks if the document has none."""
    merge = {"base": "e", "parts": [{"rank": 0, "base": "2"}]}
    requests = [{"extend": 1}, {"extend": 1}]
    (found,) = lint({"schema": "cpattn-plan/1", "requests": requests, "merges": [merge]}).findings
    (again,) = lint(found.details["smaller"]).findings
    assert again.kind == found.kind == "lse-base"
