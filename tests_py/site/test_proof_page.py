# SPDX-License-Identifier: Apache-2.0
"""Pages of proofs and of `cpattn replay` have the reports, and a browser shows them well."""

import re

import pytest

pytest.importorskip("jinja2")

from cpattn_lab.replay.report import html as of_replay
from cpattn_proof import Finding, Report
from cpattn_proof.linting.pictures import Bars
from cpattn_proof.page import Stretch, write_html
from cpattn_proof.page.html import bars_of
from cpattn_proof.page.timeline import drawing
from support import chromium
from support.chromium import DESK, TELEPHONE, Screen
from support.replay.replay_models import make_report, make_sparse_report

BARS = Bars(100, 200, mark=150)
BARS.add("rank 0", [(100, 150), (160, 200)])
BARS.add("b", [])
TWICE = Finding("OWN", "token 5 is on 2 ranks", ranks=(0, 1), picture=BARS.picture("tokens"))
HANG = Finding("SEQ", "all <wait>", where="a.py:3", picture="rank 0  x\nrank 1  y", kind="hang")
REPORTS = [
    Report("lint", "plan.json", (TWICE,), checked=("OWN",), not_checked={"BAL": "no bound"}),
    Report("simulate", "train.py on 2 ranks", (HANG,), facts={"seeds": [0, 1]}),
]
STRETCHES = [
    Stretch(rank, name, begin, begin + 0.001 * (rank + 1), name, "a.py:3")
    for rank in range(3)
    for name, begin in (("compute", 0.0), ("wait", 0.004), ("transfer", 0.005))
]


def page_of(reports, path, **options):
    write_html(reports, path / "report.html", **options)
    return (path / "report.html").read_text(encoding="utf-8")


def test_a_page_has_what_the_reports_have(tmp_path):
    page = page_of(REPORTS, tmp_path)
    for text in (
        "Refuted</span>: 2 findings",
        "cpattn lint: plan.json",
        "token 5 is on 2 ranks",
        "ranks\n    0, 1",
        "SEQ hang</span>: all &lt;wait&gt;",
        "rank 0  x\nrank 1  y",
        "The red line is at 150. tokens",
        "docs/proof/invariants.md#seq",
        "BAL: no bound",
        "Find the branch before the first difference",
    ):
        assert text in page
    assert "Timeline" not in page
    assert not re.search(r"(src|href)=|url\(|@import", page)  # the page loads nothing


def test_a_page_of_what_is_proved(tmp_path):
    page = page_of([Report("lint", "plan.json", checked=("OWN",))], tmp_path)
    assert 'class="good">Proved</span>: OWN</h1>' in page
    assert "<article>" not in page


def test_bars_are_drawn_to_scale():
    first = {"name": "rank 0", "title": "100 to 149, 160 to 199", "shapes": [(0, 240), (288, 192)]}
    lines = [first, {"name": "b", "title": "none", "shapes": []}]
    assert bars_of(TWICE) == {"lines": lines, "mark": 240, "number": 150, "note": "tokens"}
    assert bars_of(HANG) is None


def test_a_timeline_has_a_line_for_each_rank_and_link(tmp_path):
    page = page_of(REPORTS, tmp_path, stretches=STRETCHES)
    assert page.count("<rect class=") == len(STRETCHES)
    assert "8.000 ms under the model of the link." in page
    assert "rank 2: wait, 3.000 ms, a.py:3" in page
    shapes = drawing(STRETCHES)["shapes"]
    assert {shape["y"] for shape in shapes if shape["kind"] == "transfer"} == {18, 60, 102}


def test_of_many_stretches_the_longest_are_drawn_and_the_last_ends_it(tmp_path):
    many = [Stretch(0, "wait", i, i + (2 if i < 4000 else 1), "wait") for i in range(4005)]
    drawn = drawing(many)
    assert len(drawn["shapes"]) == 4000
    assert drawn["left_out"] == 5
    assert drawn["milliseconds"] == 4005e3
    assert "the 5 shortest stretches are not drawn" in page_of([], tmp_path, stretches=many)
    assert drawing([]) is None


@pytest.fixture(scope="module")
def browser():
    with chromium.started() as browser:
        yield browser


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "width", "scheme"),
    [
        (None, TELEPHONE, "light"),
        (None, DESK, "dark"),
        (make_report, DESK, "light"),
        (make_sparse_report, TELEPHONE, "dark"),
    ],
)
def test_everybody_can_read_it(make, width, scheme, browser, tmp_path):
    path = tmp_path / "report.html"
    if make is None:
        write_html(REPORTS, path, stretches=STRETCHES)
    else:
        of_replay.write_html(make(), "a title", path)
    screen = Screen(browser, width, scheme)
    wrong = [*screen.show(path.as_uri()), *screen.sideways(), *screen.complaints_of_axe()]
    screen.close()
    assert wrong == []
