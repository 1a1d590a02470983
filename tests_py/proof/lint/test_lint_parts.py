# SPDX-License-Identifier: Apache-2.0
"""Small plans by hand: writes, shared pages, heads, and what is left undecided."""

from __future__ import annotations

import pytest

pytest.importorskip("jsonschema")

from cpattn.proof import lint
from support.proof.plans import document_of, kinds, with_cache


def of_writes(*runs, pad=0, **cache):
    """One rank that writes runs of (request, position, count, slot) for four new tokens."""
    columns = zip(("request", "position", "count", "slot"), zip(*runs, strict=True), strict=True)
    return {
        "schema": "cpattn-plan/1",
        "requests": [{"extend": 4, "pad": pad}],
        "cache": {"page_size": 4, **cache},
        "ranks": [{"writes": {name: list(values) for name, values in columns}}],
    }


def test_padding_may_be_written_nowhere_and_tokens_somewhere():
    """Slot -1 is none, whether a row of padding is of no request or behind one. Tokens are written
    to no slot below 0, even if nobody says how many there are, and not where padding goes."""
    tokens, sizes = (0, 0, 4, 4), {"pad": 4, "num_pages": 4}
    for row in ((-1, 0, 1, -1), (0, 4, 1, -1), (0, 6, 1, -1)):
        assert kinds(of_writes(tokens, row, **sizes)) == set()
    assert kinds(of_writes(tokens, (0, 6, 2, 0), **sizes, padding_page=0)) == set()
    assert kinds(of_writes(tokens, (0, 6, 2, 0), **sizes)) == {"pad-slot"}
    assert "own-slot" in kinds(of_writes(tokens, (0, 6, 3, 0), **sizes))
    assert kinds(of_writes((0, 0, 4, 4))) == set()
    assert kinds(of_writes((0, 0, 3, 4), (0, 3, 1, -1))) == {"addr-slot"}
    assert kinds(of_writes((0, 0, 4, 4), (-1, 0, 1, 0), padding_page=0)) == set()
    (found,) = lint(of_writes((0, 0, 4, 2), (-1, 0, 1, 4), padding_page=1)).findings
    assert found.kind == "pad-slot"
    assert found.what == "rank 0 writes position 2 of request 0 to page 1, which is for padding"
    assert "len-pages" in kinds(of_writes((0, 0, 4, 4), padding_page=1, tables=[[1]]))


def replicated(change=lambda ranks: None):
    """Four ranks in decoding: two share out the keys of some heads, two those of others."""
    ranks = []
    for rank in range(4):
        writes = {"request": [0], "position": [4 + rank % 2], "count": [1], "slot": [2]}
        call = {"request": [0, 0], "row": [0, 1], "rows": [1, 1], "keys": [3 - rank % 2, 3]}
        rows = {"request": [0], "position": [4], "count": [2]}
        ranks.append({"rows": rows, "segments": call, "key_lens": [3], "writes": writes})
    change(ranks)
    requests, cache = [{"prefix": 4, "extend": 2}], {"page_size": 4, "shards": 2}
    document = {"requests": requests, "queries": "all", "cache": cache, "ranks": ranks}
    return lint({"schema": "cpattn-plan/1", **document})


def test_ranks_of_one_shard_have_other_heads():
    report = replicated()
    assert report.findings == ()
    assert {"OWN", "COV", "LEN"} <= set(report.checked)
    (found,) = replicated(lambda ranks: ranks[2]["segments"]["keys"].__setitem__(0, 2)).findings
    assert (found.kind, found.ranks) == ("cov-shard", (2,))
    nothing = {name: [] for name in ("request", "position", "count", "slot")}
    (found,) = replicated(lambda ranks: ranks[3].update(writes=nothing)).findings
    assert found.what == "position 5 of request 0 is written 0 times by ranks 2, 3, not once"
    left = replicated(lambda ranks: ranks[3].pop("writes")).not_checked["OWN"]
    assert "3 ranks that write have not as many of each shard" in left


def test_pages_are_shared_with_the_request_that_begins_alike():
    """The longest common prefix is with request 0; with others it is as long as theirs with it."""

    def of_tables(*tables, **shares):
        requests = [{"extend": 32} for _ in tables]
        for name, (other, tokens) in shares.items():
            requests[int(name[1:])]["shares"] = {"request": other, "tokens": tokens}
        cache = {"page_size": 16, "tables": list(tables)}
        return {"schema": "cpattn-plan/1", "requests": requests, "cache": cache, "ranks": [{}]}

    first, second = [1, 2], [3, 4]
    assert kinds(of_tables(first, second, [1, 5], r2=(0, 16))) == set()
    assert kinds(of_tables(first, second, [3, 5], r2=(0, 16))) == {"len-pages"}
    assert kinds(of_tables(first, [1, 4], [1, 5], r1=(0, 16), r2=(0, 31))) == set()
    assert kinds(of_tables(first, [1, 4], [6, 4], r1=(0, 16), r2=(0, 31))) == {"len-pages"}
    assert kinds(of_tables(first, first, [1, 5], r1=(0, 32), r2=(1, 16))) == set()
    many = 1100  # each like the one before it; more than Python calls go deep
    tables = [[1, 2 + number] for number in range(many)]
    tables[1:-1] = [[many + 2 * number, 2 + number] for number in range(1, many - 1)]
    chain = of_tables(*tables, **{f"r{number}": (number - 1, 16) for number in range(1, many)})
    assert kinds(chain) == set()
    chain["requests"][1000]["shares"]["tokens"] = 15
    (found,) = lint(chain, shrink=False).findings
    assert "which are alike in 15 tokens, not 16" in found.what
    three = of_tables(first, [6, 4], [6, 5], r1=(0, 16), r2=(0, 15))
    (found,) = lint(three).findings
    assert kinds(found.details["smaller"]) == {"len-pages"}


def test_bars_mark_every_cell_that_a_range_touches():
    from cpattn.proof.linting.pictures import WIDTH, Bars

    for end in (1, 7, 48, 49, 144, 1000, 2**40):
        bars = Bars(0, end, end - 1)
        bars.add("some", [(end // 3, end // 2 + 1), (end - 1, end + 5), (-3, 0), (4, 4)])
        width, picture = min(WIDTH, end), bars.picture().splitlines()
        cells = {end // 3 * width // end, end // 2 * width // end}
        marked = {i for i, cell in enumerate(picture[0].split()[1]) if cell == "#"}
        assert marked == {*range(min(cells), max(cells) + 1), width - 1}
        assert picture[1].index("^") == len("some  ") + width - 1


def test_query_heads_meet_their_own_heads_of_keys():
    """Kernels take them in turn: it is not enough that a rank has both."""
    nobody = {"schema": "cpattn-plan/1", "heads": {"q": 8, "kv": 2}}

    def of_heads(*ranks):
        parts = {"ranks": [{"heads": {"q": q, "kv": kv}} for q, kv in ranks]}
        return lint(nobody | parts).findings

    first, second = [*range(4)], [*range(4, 8)]
    assert of_heads((first, [0]), (second, [1])) == ()
    assert of_heads(([0, 1, 4, 5], [0, 1]), ([2, 3, 6, 7], [0, 1])) == ()
    (found,) = of_heads((first, [0, 1]), (second, [1]))
    assert found.what.startswith("rank 0 takes the head of keys 1 for query head 2, whose own is 0")
    assert "own-head" in {found.kind for found in of_heads(([8], []))}
    assert lint(nobody).checked == ()


def test_what_would_not_fit_into_memory_is_left_undecided():
    """Calls that take all runs of a rank, and one long table among many short ones."""
    many = 4000
    rows = {"request": [0] * many, "position": list(range(many)), "count": [1] * many}
    calls = {"request": [0], "row": [0], "rows": [many], "keys": [many]}
    part = {"rows": rows, "segments": {name: value * many for name, value in calls.items()}}
    document = {"schema": "cpattn-plan/1", "requests": [{"extend": many}], "ranks": [part]}
    report = lint(document)
    assert report.findings == ()
    assert "meet more than 10,000,000 times" in report.not_checked["COV"]
    tables = [list(range(100_000)), *([100_000 + number] for number in range(many))]
    document["requests"] = [{"extend": 1}, *[{"extend": 0}] * many]
    document["cache"] = {"page_size": 1, "tables": tables}
    document["ranks"] = [{"writes": {"request": [0], "position": [0], "count": [1], "slot": [0]}}]
    assert kinds(document) == set()


def test_ranks_that_count_no_keys_are_not_marked():
    document = document_of([8], [0], 2)
    document["ranks"][0]["key_lens"] = [7]
    (found,) = lint(with_cache(document), shrink=False).findings
    assert [line.endswith("<") for line in found.picture.splitlines()] == [True, False]
