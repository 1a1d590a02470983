# SPDX-License-Identifier: Apache-2.0
"""Small plans by hand have every part of a plan; right ones are proved, and faults are named."""

from copy import deepcopy

import pytest

from cpattn_proof import lint
from cpattn_proof.linting.pictures import WIDTH, Bars
from support.proof.plans import document_of, kinds, with_cache


def findings(**parts):
    return lint({"schema": "cpattn-plan/1", **parts}, shrink=False).findings


def of_calls(*ranks):
    return findings(ranks=[{"collectives": calls} for calls in ranks])


def call(kind, size=8, **options):
    return {"kind": kind, "size": size, **options}


GATHER, REDUCE = call("all_gather", dtype="float32"), call("all_reduce", op="sum")


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ([REDUCE, GATHER], "seq-kind"),
        ([GATHER | {"size": 9}, REDUCE], "seq-size"),
        ([GATHER | {"dtype": "bfloat16"}, REDUCE], "seq-dtype"),
        ([GATHER, REDUCE | {"op": "max"}], "seq-op"),
        ([GATHER, REDUCE | {"root": 1}], "seq-root"),
        ([GATHER], "seq-missing"),
        ([GATHER, REDUCE, REDUCE], "seq-missing"),
    ],
)
def test_ranks_that_do_not_meet_are_refuted(other, kind):
    (found,) = of_calls([GATHER, REDUCE], other)
    assert (found.kind, found.ranks) == (kind, (0, 1))
    assert found.picture.splitlines()[0].split() == ["rank", "0", "rank", "1"]
    assert any(line.startswith(">") for line in found.picture.splitlines())


def test_groups_entered_in_another_order_are_refuted():
    """Rank 0 waits for rank 1 in one group, and rank 1 waits for rank 0 in the other."""
    one, two = call("all_reduce", group=[0, 1]), call("all_gather", group=[0, 1, 2])
    (found,) = of_calls([one, two], [two, one], [two])
    assert found.kind == "seq-order"
    assert found.ranks == (0, 1, 2)
    assert "rank 0 waits in all_reduce 8 for rank 1, which waits in all_gather 8" in found.what
    assert of_calls([one, two], [one, two], [two]) == ()


def test_sizes_of_an_all_to_all_are_for_all_ranks_of_the_group_and_fit():
    def exchange(sends=None, receives=None, **options):
        given = {"sends": sends, "receives": receives} | options
        named = {name: value for name, value in given.items() if value is not None}
        return [{"kind": "all_to_all", **named}]

    def what(*ranks):
        return [found.what for found in of_calls(*ranks)]

    pair = exchange([1, 1], [1, 1])
    assert what(exchange([1, 2], [1, 3]), exchange([3, 4], [2, 4])) == []
    assert what(pair, exchange(size=2)) == []  # one size stands for equal parts
    turned = exchange([4, 3], [4, 2], group=[1, 0])  # its own part comes first
    assert what(exchange([1, 2], [1, 3], group=[0, 1]), turned) == []
    two, three = (
        f"sends rank {peer} {n} elements, which expects 1" for peer, n in ((1, 2), (0, 3))
    )
    assert what(exchange([1, 2], [1, 3]), exchange([3, 4], [1, 4])) == [f"rank 0 {two}"]
    assert what(exchange(size=4), pair) == [f"rank 0 {two}"]
    assert what(exchange(receives=[1, 1]), exchange([3, 1])) == [f"rank 1 {three}"]
    assert what(exchange([1, 1, 9], [1, 1]), pair) == ["rank 0 sends 3 parts in a group of 2 ranks"]
    assert what(exchange([5], [])) == ["rank 0 receives no part in a group of 1 rank"]


def test_calls_are_made_by_the_group_that_they_are_for():
    """Each group agrees within itself, whatever ranks it has."""
    meant = {"dp": [[0, 2], [1, 3]], "dp x cp": [[3, 2, 1, 0]]}

    def of_group(over, *groups, **call):
        owner = {rank: group for group in groups for rank in group}
        call = REDUCE | {"over": over} | call
        ranks = [{"collectives": [call | {"group": owner[rank]}]} for rank in range(4)]
        return lint({"schema": "cpattn-plan/1", "ranks": ranks, "groups": meant}).findings

    assert of_group("dp", [0, 2], [3, 1]) == ()
    assert of_group("dp x cp", [0, 1, 2, 3]) == ()
    (found,) = of_group("dp x cp", [0, 2], [1, 3], label="tokens")
    assert found.kind == "seq-group"
    assert found.ranks == (1, 3)
    assert found.what == (
        "rank 0 calls all_reduce 8 sum (tokens) of ranks 0, 2; for dp x cp it is 0-3"
    )
    (again,) = lint(found.details["smaller"]).findings
    assert again.kind == "seq-group"


def test_messages_are_received():
    send, receive = call("send", peer=1), call("recv", peer=0)
    assert of_calls([send], [receive]) == ()
    assert of_calls([send, call("recv", peer=1)], [call("send", peer=0), receive]) == ()
    for other in ([], [receive | {"size": 9}], [receive, receive], [receive | {"tag": 3}]):
        assert [found.kind for found in of_calls([send], other)] == ["seq-message"]


PARTS = [{"rank": rank, "base": "e", "sinks": rank == 0, "empty": "-inf"} for rank in range(2)]
MERGED = {
    "requests": [{"prefix": 9, "extend": 1}],
    "attention": {"sinks": True},
    "cache": {"page_size": 4, "shards": 2},
    "ranks": [{}, {}],
    "merges": [{"base": "e", "both_empty": "zero", "parts": PARTS}],
}


def test_partial_results_that_fit_are_proved_as_far_as_the_document_says():
    assert findings(**MERGED) == ()
    document = deepcopy(MERGED)
    del document["ranks"]
    document["merges"][0]["parts"] = PARTS[:1]
    report = lint({"schema": "cpattn-plan/1", **document})
    assert report.findings == ()
    assert report.not_checked["LSE"] == "parts: the document has no ranks"


def test_merges_of_many_requests_are_judged():
    many = 300
    document = deepcopy(MERGED) | {"requests": [{"extend": 1}, *[{"extend": 2}] * many]}
    document["cache"]["shards"] = 4
    document["ranks"] = [{}] * 4
    assert findings(**document) == ()  # the other shards are still empty
    document["requests"][many] = {"extend": 3}
    (found,) = findings(**document)
    assert found.what == f"rank 2 keeps 1 keys of request {many}, and takes no part"


def with_part(**changes):
    def change(document):
        document["merges"][0]["parts"][1].update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (with_part(base="2"), "lse-base", "rank 1 gives an LSE of base 2"),
        (with_part(sinks=True), "lse-sink", "2 parts counted the sinks, not 1"),
        (with_part(empty="finite"), "lse-empty", "an LSE that is finite, not -inf"),
        (with_part(rank=0), "lse-part", "rank 0 takes part 2 times"),
        (lambda d: d["merges"][0]["parts"].pop(), "lse-part", "rank 1 keeps 5 keys of request 0"),
        (lambda d: d["merges"][0].update(both_empty="nan"), "lse-empty", "merged to NaN"),
        (lambda d: d["attention"].clear(), "lse-sink", "1 part counted the sinks, not 0"),
        (lambda d: d["merges"][0].update(base="2"), "lse-base", "rank 0 gives an LSE of base e"),
    ],
)
def test_partial_results_that_do_not_fit_are_refuted(change, kind, says):
    document = deepcopy(MERGED)
    change(document)
    (found,) = findings(**document)
    assert found.kind == kind
    assert says in found.what
    assert "rank 0  base e" in found.picture


NAMES = ("request", "position", "key", "index")


def selected(index=(0, 1), key=(0, 2)):
    """Return a plan whose query selects two of its three keys on rank 0, and one on rank 1."""
    lines = [[(0, 5, key[i], index[i]) for i in range(2)], [(0, 5, 3, 1)]]
    ranks = [
        {"selections": {name: [line[i] for line in own] for i, name in enumerate(NAMES)}}
        for own in lines
    ]
    return {
        "requests": [{"prefix": 5, "extend": 1}],
        "topk": {"k": 3},
        "cache": {"page_size": 4, "shards": 2},
        "ranks": ranks,
    }


def scored(*scores):
    return [{"request": 0, "position": 5, "scores": list(scores)}]


def test_selections_are_whole_and_local():
    assert findings(**selected()) == ()
    for kind, options in [
        ("topk-index", {"index": (0, 2)}),
        ("topk-index", {"key": (0, 1)}),
        ("topk-twice", {"key": (2, 2), "index": (1, 1)}),
        ("topk-key", {"key": (0, 8), "index": (0, 4)}),
    ]:
        assert [found.kind for found in findings(**selected(**options))] == [kind]
    few = selected()
    for column in few["ranks"][1]["selections"].values():
        column.pop()
    (found,) = findings(**few)
    assert found.what == "query 5 of request 0 selects 2 keys over all ranks, not 3"


def test_scores_decide_what_is_selected():
    document = selected()
    document["topk"]["scores"] = scored(5, 1, 5, 5, 2, 3, 99)
    assert findings(**document) == ()  # the last key is after the query
    document["topk"]["scores"] = scored(5, 1, 5, 5, 6, 3, 99)
    (found,) = findings(**document)
    assert found.kind == "topk-score"
    assert found.details["key"] == 4
    del document["topk"]["scores"]
    document["ranks"] = [{"selections": {name: [] for name in NAMES}}] * 2
    assert findings(**document) == ()  # a plan without queries is right
    document["topk"]["scores"] = scored(*[1.0] * 6)
    (found,) = findings(**document)
    assert found.what == "query 5 of request 0 selects no keys on any rank, not 3"
    assert found.kind == "topk-count"


def of_writes(*runs, pad=0, **cache):
    """Return a plan whose rank writes runs (request, position, count, slot) of four new tokens."""
    columns = zip(("request", "position", "count", "slot"), zip(*runs, strict=True), strict=True)
    return {
        "schema": "cpattn-plan/1",
        "requests": [{"extend": 4, "pad": pad}],
        "cache": {"page_size": 4, **cache},
        "ranks": [{"writes": {name: list(values) for name, values in columns}}],
    }


def test_padding_may_be_written_nowhere_and_tokens_somewhere():
    """Padding may have slot -1, whether its row belongs to no request or lies behind one. Tokens
    need a slot from 0 on, even if the number of slots is unknown, and not one for padding."""
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


def test_pages_are_shared_with_the_request_that_begins_alike():
    """Requests may have pages in common up to their common prefix, also by way of a third one."""

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
    many = 1100  # a chain of sharing, longer than Python's stack
    tables = [[1, 2 + number] for number in range(many)]
    tables[1:-1] = [[many + 2 * number, 2 + number] for number in range(1, many - 1)]
    chain = of_tables(*tables, **{f"r{number}": (number - 1, 16) for number in range(1, many)})
    assert kinds(chain) == set()
    chain["requests"][1000]["shares"]["tokens"] = 15
    (found,) = lint(chain, shrink=False).findings
    assert "which are alike in 15 tokens, not 16" in found.what
    (found,) = lint(of_tables(first, [6, 4], [6, 5], r1=(0, 16), r2=(0, 15))).findings
    assert kinds(found.details["smaller"]) == {"len-pages"}


def test_bars_mark_every_cell_that_a_range_touches():
    for end in (1, 7, 48, 49, 144, 1000, 2**40):
        bars = Bars(0, end, end - 1)
        bars.add("some", [(end // 3, end // 2 + 1), (end - 1, end + 5), (-3, 0), (4, 4)])
        width, picture = min(WIDTH, end), bars.picture().splitlines()
        cells = {end // 3 * width // end, end // 2 * width // end}
        marked = {i for i, cell in enumerate(picture[0].split()[1]) if cell == "#"}
        assert marked == {*range(min(cells), max(cells) + 1), width - 1}
        assert picture[1].index("^") == len("some  ") + width - 1


def test_query_heads_meet_their_own_heads_of_keys():
    """Kernels pair heads in their order, so it is not enough that a rank has the right ones."""
    nobody = {"schema": "cpattn-plan/1", "heads": {"q": 8, "kv": 2}}

    def of_heads(*ranks):
        return lint(nobody | {"ranks": [{"heads": {"q": q, "kv": kv}} for q, kv in ranks]}).findings

    first, second = [*range(4)], [*range(4, 8)]
    assert of_heads((first, [0]), (second, [1])) == ()
    assert of_heads(([0, 1, 4, 5], [0, 1]), ([2, 3, 6, 7], [0, 1])) == ()
    (found,) = of_heads((first, [0, 1]), (second, [1]))
    assert found.what.startswith("rank 0 takes the head of keys 1 for query head 2, whose own is 0")
    assert "own-head" in {found.kind for found in of_heads(([8], []))}
    assert lint(nobody).checked == ()


def test_what_would_not_fit_into_memory_is_left_undecided():
    """Calls may take all runs of a rank, and one long table may stand among many short ones."""
    many = 4000
    rows = {"request": [0] * many, "position": list(range(many)), "count": [1] * many}
    calls = {"request": [0], "row": [0], "rows": [many], "keys": [many]}
    part = {"rows": rows, "segments": {name: value * many for name, value in calls.items()}}
    document = {"schema": "cpattn-plan/1", "requests": [{"extend": many}], "ranks": [part]}
    report = lint(document)
    assert report.findings == ()
    assert "meet more than 2,000,000 times" in report.not_checked["COV"]
    steps = {"request": [0], "position": [0], "count": [1], "step": [2]}
    ranks = [{"rows": steps, "heads": {"q": [0], "group": rank}} for rank in range(2)]
    requests = [{"extend": 2**23 + 1}]
    steps = document | {"ranks": ranks, "heads": {"q": 1}, "queries": "all", "requests": requests}
    report = lint(steps)
    assert "8,388,609 tokens in steps on 2 ranks" in report.not_checked["OWN"]
    assert "OWN" not in report.checked  # the heads are right, all the same
    whole = {"position": [0], "count": [2**23]}
    ranks = [{"positions": whole, "rows": whole | {"request": [-1]}}] * 3
    report = lint(document | {"ranks": ranks, "requests": []})
    assert "25,165,824 rows one by one" in report.not_checked["OWN"]
    entry = {"layer": 0, "kind": "k", "addr": 0, "nbytes": 1, "item_len": 1}
    memories = {"a": {"page_size": 1, "entries": [entry] * 4000}}
    blocks = {name: [] for name in ("src", "dst", "length")}
    pages = {"src_pages": [*range(many)], "dst_pages": [*range(many)]}
    transfers = [{"from": "a", "to": "a", **blocks, **pages}]
    report = lint({"schema": "cpattn-plan/1", "memories": memories, "transfers": transfers})
    assert "buffers of more than 10,000,000 pages" in report.not_checked["XFER"]
    merges = {"merges": [{"parts": []}] * 5000, "cache": {"page_size": 1, "shards": 2001}}
    merges |= {"ranks": [{}] * 2001, "schema": "cpattn-plan/1"}
    assert "more than 10,000,000 pairs" in lint(merges).not_checked["LSE"]
    cache = {"page_size": 1, "shards": 2001, "tables": [[*range(many * 10)]]}
    pages = merges | {"requests": [{"extend": 1}], "cache": cache}
    assert "tables of all shards have more than 50,000,000" in lint(pages).not_checked["LEN"]
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
