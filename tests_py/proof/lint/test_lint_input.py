# SPDX-License-Identifier: Apache-2.0
"""One line refuses what is no plan, and no numbers make the linter fail; command and page."""

import json
import re
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn_proof import NotUsable, lint
from cpattn_proof.linting import SCHEMA, schema
from support.command_line import invoke
from support.places import ROOT
from support.proof.plans import document_of, with_cache

BATCH = ([13, 10], [0, 6], 3)
CALLS = [{"kind": "all_to_all", "sends": [4, 4, 4], "receives": [4, 4, 4]}, {"kind": "barrier"}]


def whole_document():
    document = with_cache(document_of(*BATCH))
    document["units"] = {"ratio": 4, "window": 4}
    units = [
        (number, unit)
        for number, request in enumerate(document["requests"])
        for unit in range(request["prefix"] // 4, (request["prefix"] + request["extend"]) // 4)
    ]
    for number, rank in enumerate(document["ranks"]):
        mine = units if number == 0 else []
        rank["units"] = {
            "request": [request for request, _ in mine], "unit": [unit for _, unit in mine],
            "position": [4 * unit for _, unit in mine], "count": [4] * len(mine),
        }  # fmt: skip
        rank["collectives"] = deepcopy(CALLS)
        rank["key_lens"] = [13, 16]
        rank["buffers"] = [{"name": "slots", "size": 4, "used": 4}]
        rank["products"] = [{"name": "page", "index": 7, "stride": 9, "bits": 32}]
        rank["heads"] = {"q": [2 * number, 2 * number + 1], "kv": [number], "group": 0}
        rank["selections"] = {"request": [0], "position": [number], "key": [0], "index": [0]}
    document["heads"] = {"q": 6, "kv": 3}
    document["attention"] = {"window": 1000}
    document["topk"] = {"k": 1, "scores": [{"request": 0, "position": 0, "scores": [1.0]}]}
    document["merges"] = [{"base": "e", "parts": [{"rank": 0, "base": "e", "sinks": False}]}]
    entry = {"layer": 0, "kind": "k", "addr": 4096, "nbytes": 4096, "item_len": 512}
    entry["dtype"] = "float16"
    side = {"axes": [{"axis": "token", "size": 4}, {"axis": "dim", "size": 8}]}
    document["layouts"] = [{"buffer": "k", "writer": side, "reader": deepcopy(side)}]
    memory = {"page_size": 4, "entries": [entry], "registered": [[4096, 4096]]}
    document["memories"] = {"prefill": memory, "decode": deepcopy(memory)}
    pages = {"src_pages": [1, 2], "dst_pages": [3, 0]}
    blocks = {"src": [4608, 5120], "dst": [5632, 4096], "length": [512, 512]}
    document["transfers"] = [{"from": "prefill", "to": "decode", **pages, **blocks}]
    return document


def places(value, path=()):
    """Yield the paths of all integers of a document."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield path
    for key, one in value.items() if isinstance(value, dict) else []:
        yield from places(one, (*path, key))
    for key, one in enumerate(value) if isinstance(value, list) else []:
        yield from places(one, (*path, key))


@given(st.data())
def test_no_numbers_make_it_fail(data):
    """The linter reports a wrong number as a finding, or refuses the document; it never fails."""
    document = whole_document()
    all_places = list(places(document))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(all_places))
        part = document
        for key in path:
            part = part[key]
        part[last] = data.draw(st.sampled_from([-2, -1, 0, 1, 2, 5, 17, 100, 2**31, 2**62]))
    try:
        report = lint(document)
    except NotUsable:
        return
    assert report.exit_code in (0, 1)
    json.loads(report.to_json())
    assert report.text()


@pytest.mark.parametrize("part", sorted(set(whole_document()) - {"schema"}))
def test_every_part_may_be_left_out(part):
    document = whole_document()
    del document[part]
    if part in ("requests", "ranks", "memories"):  # other parts refer to these
        with pytest.raises(NotUsable, match="must "):
            lint(document)
    else:
        assert lint(document).not_checked


def test_the_whole_document_is_right():
    report = lint(whole_document() | {"balance": {"bound": 2}})
    assert report.text().startswith("plan: proved")
    assert len(report.checked) == 11
    assert set(report.not_checked) == {"OWN", "LSE", "SEQ"}


def test_numbers_and_arrays_of_numpy_are_those_of_json():
    document = whole_document()
    for rank in document["ranks"]:
        rank["rows"] = {name: np.array(values) for name, values in rank["rows"].items()}
        rank["segments"] = {name: tuple(values) for name, values in rank["segments"].items()}
    document["requests"] = [{n: np.int32(v) for n, v in r.items()} for r in document["requests"]]
    document["topk"]["scores"][0]["scores"] = np.ones(1, np.float32)
    document["attention"]["causal"] = np.bool_(True)
    assert lint(document).as_dict()["checked"] == lint(whole_document()).as_dict()["checked"]
    document["ranks"][0]["rows"]["position"] = np.array([0.5] * 2)
    with pytest.raises(NotUsable, match=r"position\[0\]: must be of type integer, got 0.5"):
        lint(document)


def test_the_schema_is_one():
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$id"] == SCHEMA
    jsonschema.validate(whole_document(), schema())


def rows(request, position, count):
    return {"ranks": [{"rows": {"request": request, "position": position, "count": count}}]}


def calls(*ranks):
    return {"ranks": [{"collectives": [call] if call else []} for call in ranks]}


ONE = {"requests": [{"extend": 1}]}
MANY = {"ranks": [{"tables": [[]] * 2**17, "key_lens": []}, {"tables": [[]] * 2**17}]}
SHARING = {"requests": [*ONE["requests"], {"extend": 1, "shares": {"request": 1, "tokens": 1}}]}
NOTHING_SENT = {name: [] for name in ("src_pages", "dst_pages", "src", "dst", "length")}
HUGE = int("1" + "0" * 400)  # larger than any float64
BAD = {
    "schema must be 'cpattn-plan/1', got 'cpattn-plan/2'": {"schema": "cpattn-plan/2"},
    "requests[0].extend: must be at least 0, got -1": {"requests": [{"extend": -1}]},
    "ranks[0].heads.q[0]: must be at most": {"ranks": [{"heads": {"q": [HUGE], "kv": [0]}}]},
    "requests[0].extend: must be of type integer, got True": {"requests": [{"extend": True}]},
    "Additional properties are not allowed ('request' was": {"request": []},
    "'extend' is a required property; unknown: 'extends'": {"requests": [{"extends": 3}]},
    r"ranks[0].buffers[0].name: must be printable, got '\x1b]0;a'": {
        "ranks": [{"buffers": [{"name": "\x1b]0;a", "size": 1, "used": 1}]}]
    },
    "memories.a.registered: must end below 18446744073709551616, got 18446744073709551616": {
        "memories": {"a": {"page_size": 1, "entries": [], "registered": [[2**64 - 2, 2]]}}
    },
    "ranks: must have at least 1 entries, got 0": {"ranks": []},
    "ranks[0].rows.count[1]: must be at least 0, got -3": rows([0, 0], [0, 1], [1, -3]),
    "balance.bound: must be of type number, got nan": {"balance": {"bound": float("nan")}},
    "topk.scores[0].scores[1]: must be of type number, got -1000": {
        "topk": {"k": 1, "scores": [{"request": 0, "position": 1, "scores": [0, -HUGE]}]}
    },
    "must be of schema 'cpattn-plan/1', got something too large": {"balance": 10**5000},
    "ranks[0].rows.count[0]: must be at most 67108864, got 67108865": rows([-1], [0], [2**26 + 1]),
    "ranks[0].rows.count: must be at most 16777216 together, got 134217728": rows(
        [-1] * 2, [0] * 2, [2**26] * 2
    ),
    "columns must have equal lengths, got request 1, position 2, count 1": ONE
    | rows([0], [0, 1], [1]),
    "ranks[0].rows.request: must be below 1, got 1": ONE | rows([1], [0], [1]),
    "tables and key_lens must have one entry for each of 0 requests, got 1": {
        "ranks": [{"key_lens": [4]}]
    },
    "requests[1].shares.request: must be below 1, got 1": SHARING,
    "must have at most 262144 objects and lists, got ": MANY,
    "collectives[0].group: must have rank 0 in it": calls({"kind": "barrier", "group": [1]}, None),
    "collectives[0]: must be below 1, got 3": calls({"kind": "send", "peer": 3}),
    "collectives[0].over: must be a name of groups, got 'dp'": calls(
        {"kind": "barrier", "over": "dp"}
    ),
    "groups.dp: must be below 1, got 1": calls({"kind": "barrier"}) | {"groups": {"dp": [[0, 1]]}},
    "groups.dp: must have each rank once": calls(None) | {"groups": {"dp": [[0], [0]]}},
    "collectives[0]: recv must have a peer": calls({"kind": "recv"}),
    "transfers[0].from: must be one of memories, got 'a'": {
        "transfers": [{"from": "a", "to": "b"} | NOTHING_SENT]
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_no_plan_is_refused(message):
    with pytest.raises(NotUsable) as error:
        lint({"schema": SCHEMA} | BAD[message])
    assert message in str(error.value)
    assert str(error.value).startswith("plan: ")


TWICE = "must be JSON: an object must have each name once, got 'ranks' again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "must be JSON: Expecting value"),
        (b"[1, 2", "must be JSON"),
        (b"\xff\xfe", "must be JSON in UTF-8"),
        (b"[]", "must be an object with schema 'cpattn-plan/1'"),
        (b"{}", "schema must be 'cpattn-plan/1', got None"),
        (b"[" * 100_000, "must be JSON"),
        (b'{"schema": "cpattn-plan/1", "ranks": [{}], "ranks": [{"heads": {}}]}', TWICE),
    ],
)
def test_files_that_are_no_plans(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    with pytest.raises(NotUsable) as error:
        lint(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_files_that_are_not_there_or_have_lists_in_lists(tmp_path):
    """Lists may be so deep that Python can read them but not show them."""
    with pytest.raises(NotUsable, match="No such file"):
        lint(tmp_path / "none.json")
    path = tmp_path / "plan.json"
    for depth in range(800, 1000, 6):
        path.write_text(f'{{"schema": "cpattn-plan/1", "requests": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(NotUsable, match="must be"):
            lint(path)


PAGE = (ROOT / "docs" / "proof" / "lint.md").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the command, in a folder with a right plan, a wrong one, and a file that is none."""
    monkeypatch.chdir(tmp_path)
    right, wrong = (document_of([13, 40], [0, 64], 4) for _ in range(2))
    wrong["ranks"][1]["rows"]["count"][0] -= 1
    for name, document in {"right": right, "wrong": wrong, "none": {"schema": "x"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))

    return partial(invoke, "lint")


def test_several_plans_are_all_judged(run):
    for names, code in {"right": 0, "wrong": 1, "none": 2, "wrong none right": 2, "": 2}.items():
        result = run(*(f"{name}.json" for name in names.split()))
        assert result.exit_code == code
        if "right" in names and code:
            assert result.stderr == "Error: none.json: schema must be 'cpattn-plan/1', got 'x'\n"
            assert "wrong.json: refuted, " in result.stdout
            assert "right.json: proved" in result.stdout
            assert "position 3 of request 0 is on no rank" in result.stdout


def test_programs_read_json(run):
    one = json.loads(run("--json", "wrong.json").stdout)
    assert one["schema"] == "cpattn-report/1"
    assert one["findings"][0]["invariant"] == "OWN"
    several = json.loads(run("--json", "wrong.json", "right.json").stdout)
    assert [report["proved"] for report in several] == [False, True]
    assert json.loads(run("--json", "wrong.json", "none.json").stdout)[0]["proved"] is False


def test_what_is_required_has_to_be_checked(run):
    for ids, name, code in (
        ("OWN,COV", "right", 0), ("COV,LSE", "right", 2), ("LSE", "wrong", 1),
    ):  # fmt: skip
        assert run("--require", ids, f"{name}.json").exit_code == code
    result = run("--require", "LSE", "right.json")
    assert "right.json: not judged, LSE not checked (" in result.stdout
    assert "must be of OWN, COV, " in run("--require", "own", "right.json").stderr


def test_the_smaller_plan_is_written(run, tmp_path):
    result = run("right.json", "wrong.json", "--shrink-to", "small.json")
    assert "own-token: smaller plan written to small.json" in result.stdout
    small = json.loads((tmp_path / "small.json").read_text())
    assert len(small["requests"]) == 1
    assert lint(small, shrink=False).findings[0].kind == "own-token"
    json.loads(run("--json", "wrong.json", "--shrink-to", "small.json").stdout)
    result = run("wrong.json", "--shrink-to", "/dev/full")
    assert result.exit_code == 1
    assert "writing /dev/full: No space left on device" in result.stderr


def test_the_page_shows_what_comes_out(run):
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(block, names)
    (shown,) = re.findall(r"^```console\n\$ cpattn lint plan.json\n(.*?)^```", PAGE, re.M | re.S)
    first, dots, _ = shown.partition("...\n")
    assert dots
    assert run("plan.json").stdout.startswith(first)


def test_the_page_has_every_part_of_the_schema():
    parts = set(schema()["properties"]) - {"schema", "name"}
    parts |= set(schema()["properties"]["ranks"]["items"]["properties"])
    assert {part for part in parts if f"{part}`" not in PAGE and f".{part}" not in PAGE} == set()
