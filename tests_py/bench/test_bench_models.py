# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_models.py whose faults would make it wrong, and the table of its page."""

import re
import shlex

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("transformers", reason="transformers is not installed")

import model_tables

from bench.models.forecast import Forecasts, chunks, layer_of, passes
from bench.models.peers import ENGINES, Ranks
from bench.models.steps import Case, add_predictions, measure
from cpattn_lab.cost_model import Rates
from support.command_line import invoke
from support.places import ROOT

PROMPT = Case(5000, cached=64)
ONE, TWO, _, HOSTS = ENGINES


class Answering:
    """Peer that answers with these seconds and one token."""

    def __init__(self, name, seconds, logprob=-0.5):
        self.name, self.seconds, self.logprob, self.asked = name, seconds, logprob, []

    def ask(self, do, **arguments):
        self.asked.append((do, arguments))
        if do.startswith("rest"):
            return {"seconds": 0.25}
        best = {"7": self.logprob, "9": -3.0}
        answers = [{"tokens": [7], "best": [best]}]
        return {"seconds": self.seconds, "answers": answers, "kept": [2**20]}


@pytest.fixture(autouse=True)
def no_peak(monkeypatch):
    monkeypatch.setattr("bench.models.steps._core.measure_peak", lambda dtype, threads: 1e12)


def test_rows_have_predictions_and_what_two_ranks_take_of_the_time_of_one():
    peers = [Answering(ONE, 3.0), Answering(TWO, 4.0), Answering("cpattn", 1.0)]
    measured = measure(peers, PROMPT, 0.1)
    add_predictions(measured, [{TWO: 4.0}, {TWO: 6.0}])
    rows = {row["implementation"]: row for row in measured}
    assert [*rows] == ["cpattn", TWO, ONE]
    assert (rows[TWO]["efficiency"], rows[TWO]["predicted"]) == (0.75, 5.0)
    assert not {"efficiency", "predicted"} & {*rows[ONE], *rows["cpattn"]}
    assert rows[ONE]["ns_per_item"] == 1e9 * 3.0 / 5000
    assert model_tables.cells(rows[TWO])[-2:] == ["5 s (+25%)", "75%"]


def test_a_prompt_is_predicted_batch_by_batch():
    assert chunks(PROMPT) == [(64, 2048), (2112, 2048), (4160, 904)]
    assert passes(PROMPT, 2) == {452: 1, 1024: 2}
    rates = Rates(gflops=100.0)
    forecasts = Forecasts(layer_of("float32", quick=True), {1: rates, 2: rates})
    found = forecasts.of([Answering(name, 0.0) for name in (ONE, TWO, HOSTS, "sdpa")], PROMPT)
    assert [*found] == [ONE, TWO, HOSTS]
    alone, shared_out = (forecasts.attention(PROMPT, Ranks(size)) for size in (1, 2))
    assert (found[ONE], found[TWO]) == (0.75 + alone, 0.75 + shared_out)
    assert alone / 2 < shared_out < alone
    assert found[HOSTS] > found[TWO]  # the link takes time
    step = Case(batch=4, cached=9, steps=8)
    one, two = (Answering(name, 0.0) for name in (ONE, TWO))
    assert forecasts.of([one, two], step)[ONE] == 0.25 + forecasts.attention(step, Ranks(1))
    assert one.asked == two.asked == [("rest_of_step", {"batch": 4})]


@pytest.mark.parametrize("title", ["Prefill", "Decode"])
def test_what_the_page_predicts_is_what_its_command_says(title):
    """All cells of a table line, except for the first, are in one line of the output."""
    page = (ROOT / "docs/figures/models.md").read_text(encoding="utf-8")
    command, rest = re.search(rf'```sh title="{title}"\n(.*?)```(.*)', page, re.DOTALL).groups()
    table = re.search(r"^\| [^|]+\|.*?\n\n", rest, re.DOTALL | re.MULTILINE)[0]
    lines = [re.split(r"\s*\|\s*", line.strip("| ")) for line in table.splitlines()[2:] if line]
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "cpattn"
    output = invoke(*arguments, env={"COLUMNS": "200"}).output
    printed = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    rows = {cells[0]: cells for cells in printed}
    assert [cells[0] for cells in lines] == ["4", "8", "16"]
    for cells in lines:
        assert {*cells} <= {*rows[cells[0]]}
