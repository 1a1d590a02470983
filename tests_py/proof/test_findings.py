# SPDX-License-Identifier: Apache-2.0
"""People and programs can read findings, and the commands that prove write them with `--html`.

A judging command exits by its verdict, or with 2, whatever a program or a document has.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import cpattn
from cpattn.captures import recorder
from cpattn_proof import INVARIANTS, Finding, Report, require
from support.command_line import invoke
from support.places import ROOT

ROWS = {"request": [0], "position": [0], "count": [2]}
PLAN = {"schema": "cpattn-plan/1", "requests": [{"extend": 3}], "ranks": [{"rows": ROWS}]}


@pytest.fixture
def lint(tmp_path):
    def call(document, status=1, options=(), name="plan.json"):
        plan, path = tmp_path / name, tmp_path / "report.html"
        plan.write_text(json.dumps(document))
        result = invoke("lint", "--html", str(path), *options, str(plan))
        assert result.exit_code == status, result.output
        return path.read_text(encoding="utf-8")

    return call


def test_a_plan_on_a_page(lint):
    page = lint(PLAN)
    assert "position 2 of request 0 is on no rank, not 1" in page
    assert 'fill="var(--bar)"' in page  # the page draws the bars
    page = lint({}, status=2)
    assert "Proved" not in page
    assert "<title>cpattn: nothing was judged</title>" in page


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    result = invoke("lint", f"{tmp_path}/plan.json", "--html", str(tmp_path / "none" / "r.html"))
    assert result.exit_code in (1, 2)
    assert result.output.splitlines()[-1].startswith("Error: ")


def test_halves_of_characters_are_shown_by_their_numbers(lint):
    """The name of a file may have lone surrogates; strings within a plan are printable."""
    assert "plan\\udcff.json" in lint(PLAN, options=["--json"], name="plan\udcff.json")


def test_a_page_of_many_tokens_is_small(lint):
    """Ranks that take turns have as many ranges as tokens, but the page lists only some."""
    rows = [{"request": [0], "position": [r], "count": [9000 - r], "step": [2]} for r in (0, 1)]
    document = {"schema": "cpattn-plan/1", "requests": [{"extend": 18000}]}
    page = lint(document | {"ranks": [{"rows": part} for part in rows]})
    assert "and 8980 more" in page
    assert len(page) < 20_000


TWICE = Finding(
    "OWN",
    "token 5 is on 2 ranks",
    where="request 0, token 5",
    ranks=(0, 1),
    picture="rank 0  0-5\n\nrank 1  5-9",
    details={"token": 5},
)


def test_a_finding_reads_like_an_error_of_a_compiler():
    assert TWICE.text().splitlines() == [
        "OWN: token 5 is on 2 ranks",
        "  --> ranks 0, 1: request 0, token 5",
        "   |",
        "   |  rank 0  0-5",
        "   |  ",
        "   |  rank 1  5-9",
        "   |",
        "   = rule: Every token, head and slot has one owner, and its position travels with it.",
        "   = why:  Rows are lost, computed twice or attended to at a wrong position: "
        "fluent nonsense.",
        "   = do:   Compare the code that splits tokens over ranks with the code that reassembles "
        "them.",
        "   = see:  docs/proof/invariants.md#own",
    ]
    named = Finding("LSE", "rows differ", kind="lse-base-2", ranks=(3,), advice="Take base e.")
    assert named.text().startswith("LSE lse-base-2: rows differ\n  --> rank 3\n   = rule:")
    assert "   = do:   Take base e.\n" in named.text()


def test_a_report_ends_with_its_verdict():
    proved = Report("lint", "plan.json", checked=("OWN", "LEN"), not_checked={"BAL": "no bound"})
    assert proved.proved
    assert proved.exit_code == 0
    assert proved.text().splitlines() == [
        "plan.json: proved: OWN LEN (0.0 s)",
        "  not checked: BAL (no bound)",
    ]
    refuted = Report("lint", "plan.json", (TWICE,), checked=("OWN",), seconds=0.25)
    assert refuted.exit_code == 1
    assert "\n\nplan.json: refuted, 1 finding (0.2 s)\n" in refuted.text()
    assert "\n  checked: OWN" in refuted.text()
    document = json.loads(refuted.to_json())
    assert document["schema"] == "cpattn-report/1"
    assert not document["proved"]
    assert document["findings"][0]["details"] == {"token": 5}


def test_what_is_required_has_to_be_checked():
    """A fault refutes in any case, and a report that has checked nothing proves nothing."""
    some = Report("lint", "plan.json", checked=("OWN", "LEN"), not_checked={"COV": "no calls"})
    assert require(some, "OWN,LEN").exit_code == 0
    lacking = require(require(some, "OWN"), ("COV", "LSE"))
    assert (lacking.exit_code, lacking.proved) == (2, False)
    assert lacking.text().splitlines() == [
        "plan.json: not judged, COV LSE not checked (0.0 s)",
        "  checked: OWN LEN",
        "  not checked: COV (no calls)",
    ]
    document = json.loads(lacking.to_json())
    assert (document["verdict"], document["required"]) == ("not judged", ["OWN", "COV", "LSE"])
    assert require(Report("lint", "plan.json", (TWICE,)), "COV").exit_code == 1
    assert Report("lint", "plan.json", not_checked={"OWN": "no rows"}).exit_code == 2
    for ids in ("", "OWN,FOO", ()):
        with pytest.raises(ValueError, match=r"ids must be of OWN, COV, .*, got ('FOO'|''|none)"):
            require(some, ids)


def test_unknown_invariants_and_numbers_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"invariant must be one of OWN, COV, .*, got 'FOO'"):
        Finding("FOO", "bar")
    with pytest.raises(ValueError, match="not JSON compliant"):
        Report("lint", "plan", facts={"error": float("nan")}).to_json()


def test_the_page_has_a_section_for_each_invariant():
    page = (ROOT / "docs" / "proof" / "invariants.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(INVARIANTS)
    for invariant in INVARIANTS.values():
        assert f"\n{invariant.rule}\n" in page


ENDS_WELL = """
import atexit, os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
atexit.register(os._exit, 0)
operation = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
dist.all_reduce(torch.ones(4), op=operation)
"""


def test_the_script_does_not_choose_the_exit_code(command_line, tmp_path):
    script = tmp_path / "ends_well.py"
    script.write_text(ENDS_WELL)
    done = command_line.run("simulate", "--ranks", "2", str(script))
    assert (done.returncode, "refuted" in done.stdout) == (1, True), done.stderr


BROKEN = """
import sys
from cpattn_terminal.main import main
from cpattn_proof.linting import linter
def lint(_):
    raise {}
linter.lint = lint
sys.argv = ["cpattn", "lint", {!r}]
main()
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [("RuntimeError('oops')", "RuntimeError: oops"), ("MemoryError", "Error: out of")],
)
def test_a_fault_of_a_command_is_no_verdict(children, tmp_path, error, said):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": PLAN["schema"], "ranks": [{}]}))
    done = children.run([sys.executable, "-c", BROKEN.format(error, str(plan))])
    assert done.returncode == 2
    assert said in done.stderr


@pytest.fixture
def by_environment(monkeypatch):
    """Return a function that records this process into a file, as plug-ins do, until the end."""
    ends = []
    monkeypatch.setattr(recorder.atexit, "register", lambda end, *none: ends.append((end, none)))
    monkeypatch.setattr(recorder, "_by_environment", {})

    def record(path: Path) -> None:
        monkeypatch.setenv("CPATTN_CAPTURE", str(path))
        recorder._by_environment.clear()
        recorder.capture_by_environment()

    yield record
    for end, none in ends:
        end(*none)


def test_files_of_an_earlier_process_of_this_number_stay(by_environment, tmp_path):
    for _ in range(3):
        by_environment(tmp_path / "run-{pid}")
    cpattn.build_cp_metadata([10], cp_rank=0, cp_size=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"run-{os.getpid()}{end}" for end in ("", ".1", ".2")}


def test_an_engine_goes_on_where_nothing_can_be_recorded(by_environment, tmp_path):
    with pytest.warns(UserWarning, match="CPATTN_CAPTURE: nothing is recorded: .*No such file"):
        by_environment(tmp_path / "missing" / "run")
