# SPDX-License-Identifier: Apache-2.0
"""Windows are judged pair by pair: the keys that calls show are those that queries may see."""

from collections import Counter
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn_proof import lint
from cpattn_proof.linting.adapters.decode import from_local_lens
from support.proof.plans import document_of, kinds

NAMES = ("request", "row", "rows", "first", "keys", "step", "window", "window_right", "from")


def rows_of(rank):
    runs = rank["rows"]
    steps = runs.get("step", [1] * len(runs["count"]))
    columns = zip(runs["request"], runs["position"], runs["count"], steps, strict=True)
    return [(r, p + i * step) for r, p, count, step in columns for i in range(count)]


def allowed(document, request, position):
    rule, length = document["attention"], sum(document["requests"][request].values())
    left, right = rule.get("window"), rule.get("window_right")
    right = 0 if rule.get("causal", True) else right
    begin = 0 if left is None else max(position - left, 0)
    return range(begin, length if right is None else min(position + right + 1, length))


def calls_of(rank):
    segments, default = rank["segments"], dict.fromkeys(NAMES, -1) | {"first": 0, "step": 1}
    for number in range(len(segments["row"])):
        yield {n: segments[n][number] if n in segments else default[n] for n in NAMES}


def is_covered(document):
    """Return whether every pair is counted once; this follows the words of the schema."""
    seen = Counter()
    of_ranks = [rows_of(rank) for rank in document["ranks"]]
    for rank, rows in zip(document["ranks"], of_ranks, strict=True):
        for call in calls_of(rank):
            last = call["first"] + call["keys"] - 1
            source = call["from"]
            held = of_ranks[source] if source >= 0 else ()
            positions = [p for r, p in held if r == call["request"]]
            for number in range(call["rows"]):
                row = call["row"] + number
                if row >= len(rows) or rows[row][0] != call["request"]:
                    continue
                own = last - (call["rows"] - 1 - number) * max(call["step"], 1)
                low = max(call["first"], own - call["window"] if call["window"] >= 0 else 0)
                high = last if call["step"] == 0 else own
                if call["step"] == 0 and call["window_right"] >= 0:
                    high = min(last, own + call["window_right"])
                for key in range(low, high + 1):
                    if source < 0 or key < len(positions):
                        seen[rows[row], key if source < 0 else positions[key]] += 1
    wanted = {
        (query, key) for rows in of_ranks for query in rows for key in allowed(document, *query)
    }
    return set(seen) == wanted and set(seen.values()) <= {1}


@st.composite
def windowed(draw):
    """Draw a right plan with windows on one side or both, over a cache or in a ring."""
    extend = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    ring = draw(st.booleans())
    prefix = [0 if ring else draw(st.integers(0, 9)) for _ in extend]
    strategy = draw(st.sampled_from(["zigzag", "interleave", "contiguous"]))
    document = document_of(extend, prefix, draw(st.integers(1, 4)), strategy)
    left = draw(st.none() | st.integers(0, 8))
    rule = {"causal": draw(st.booleans()), "window": left}
    rule["window_right"] = None if rule["causal"] else draw(st.none() | st.integers(0, 8))
    document["attention"] = rule
    held = [rows_of(rank) for rank in document["ranks"]]
    for rank, rows in zip(document["ranks"], held, strict=True):
        calls = rank["segments"]
        if ring or not rule["causal"] or draw(st.booleans()):
            rank["segments"] = row_by_row(document, rows, held if ring else None)
        elif left is not None:
            calls["window"] = [left] * len(calls["row"])
    return document


def row_by_row(document, rows, held):
    """Make a call for each row, and in a ring for each rank whose keys the row sees."""
    calls = []
    for number, (request, position) in enumerate(rows):
        wanted = allowed(document, request, position)
        for source, there in enumerate(held or [None]):
            keys = wanted
            if there is not None:
                mine = [p for r, p in there if r == request]
                keys = [i for i, p in enumerate(mine) if p in wanted]
            if len(keys):
                calls.append(
                    (request, number, 1, keys[0], len(keys), 0, -1, -1, source if held else -1)
                )
    return {name: [call[i] for call in calls] for i, name in enumerate(NAMES)}


def assert_judged_as_counted(document, data, names):
    """Check that a right plan is proved, and that one changed number gets the right verdict."""
    assert is_covered(document)
    report = lint(document, shrink=False)
    assert report.findings == ()
    assert "COV" in report.checked
    ranks = [rank["segments"] for rank in document["ranks"] if rank["segments"]["row"]]
    if not ranks:
        return
    calls = data.draw(st.sampled_from(ranks))
    count = len(calls["row"])
    for name in {"window", "window_right"}.intersection(names):
        calls.setdefault(name, [-1] * count)
    name = data.draw(st.sampled_from([n for n in calls if n in names]))
    call = data.draw(st.integers(0, count - 1))
    least = {"first": 0, "step": 0, "keys": 0}.get(name, -1)
    calls[name][call] = max(calls[name][call] + data.draw(st.sampled_from([-1, 1, 4])), least)
    invariants = {found.invariant for found in lint(document, shrink=False).findings}
    assert ("COV" in invariants) == (not is_covered(document))


@given(windowed(), st.data())
def test_what_calls_show_is_what_queries_may_see(document, data):
    assert_judged_as_counted(document, data, NAMES[3:8])


def plan_of(*ranks, window=1, **parts):
    """Plan two ranks of a sequence of eight tokens; calls are (row, rows, first, keys, from)."""
    columns = ("row", "rows", "first", "keys", "from")
    parts |= {"schema": "cpattn-plan/1", "requests": [{"extend": 8}]}
    parts["ranks"] = [
        {
            "rows": {"request": [0], "position": [4 * number], "count": [4]},
            "segments": {
                "request": [0] * len(calls),
                **{name: [call[i] for call in calls] for i, name in enumerate(columns)},
                "window": [window] * len(calls),
            },
        }
        for number, calls in enumerate(ranks)
    ]
    return {"attention": {"window": 1}} | parts


def test_rings_with_windows_need_the_keys_of_the_rank_before():
    own, halo = (0, 4, 0, 4), (0, 1, 3, 1, 0)
    assert kinds(plan_of([(*own, 0)], [(*own, 1), halo])) == set()
    (found,) = lint(plan_of([(*own, 0)], [(*own, 1)])).findings
    assert found.what == "position 4 of request 0 never sees key 3, it may see 3 to 4"
    (found,) = lint(plan_of([(*own, 0)], [(*own, 1), halo], window=-1)).findings
    assert found.what == "position 2 of request 0 sees key 0, it may see 1 to 2"


def test_the_balance_is_of_pairs_within_the_window():
    whole = document_of([256], [7], 8, "contiguous")
    for window, least in ((4, 5), (200, None)):
        document = deepcopy(whole) | {"attention": {"window": window}, "balance": {"bound": 1}}
        for rank in document["ranks"]:
            rank["segments"]["window"] = [window] * len(rank["segments"]["row"])
        findings = lint(document, shrink=False).findings
        if least is not None:
            assert findings == ()
            continue
        (found,) = findings
        assert found.details["pairs"] == 32 * 201
        seen = [min(position + 1, 201) for position in range(7, 263)]
        assert found.details["mean"] == sum(seen) / 8


@pytest.mark.parametrize("null", [-1, 0])
@pytest.mark.parametrize("shards", [1, 2])
def test_pages_before_the_window_need_not_exist(null, shards):
    """Engines free them; the table then names page 0, or no page, in place of each."""
    length = 48 * shards
    document = from_local_lens(
        [length], [[48]] * shards, [[[null, null, 4]]] * shards, block_size=16
    )
    assert kinds(document) == {"len-pages"}
    for rank in document["ranks"]:
        rank.pop("segments")
    for window, found in ((16 * shards - 1, set()), (47 * shards, {"len-pages"})):
        assert kinds(document | {"attention": {"window": window}}) == found
