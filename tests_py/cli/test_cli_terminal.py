# SPDX-License-Identifier: Apache-2.0
"""Commands look well on terminals of any width, without one, without colours, in ASCII."""

import io
import os
import re
import sys
from unittest import mock

import pytest
from rich.console import Console

from cpattn_terminal import progress as _progress
from cpattn_terminal import tables as _tables
from support.command_line import QUICK, invoke, run_on_terminal

EXPLAIN = ("explain", "--lens", "12500000,13", "--prefix", "0,900", "--cp-size", "4")
PLAN = ("plan", "--cp-size", "8,16")
REPLAY = (*QUICK, "--requests=4")
HEADERS = {"explain": "pairs", "plan": "attention", "replay": "error", "": "Commands:"}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3|4|9|10)[0-7][;m]")
ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def visible(lines: list[str]) -> list[str]:
    """Return the text of lines with control sequences that stays on the screen."""
    # The next line of a bar erases the previous one.
    return [CONTROL.sub("", line.split("\x1b[2K")[-1]).rstrip() for line in lines]


@pytest.mark.parametrize("command", [(), EXPLAIN, pytest.param(REPLAY, marks=pytest.mark.slow)])
def test_a_terminal_is_not_too_narrow(command_line, command):
    """Output fits into 60 columns; a replay also shows its progress in colours."""
    written = run_on_terminal(command_line, 60, *command)
    lines = visible(written)
    assert not any("Traceback" in line or "…" in line for line in lines)
    assert max(len(line) for line in lines if not line.startswith("cpattn replay: ")) <= 60
    assert any(HEADERS[" ".join(command[:1])] in line.split() for line in lines)
    if command == REPLAY:
        assert COLOUR.search("\n".join(written))
        assert "processes are ready" in CONTROL.sub("", "\n".join(written))


@pytest.mark.parametrize("command", [EXPLAIN, PLAN], ids=lambda command: command[0])
@pytest.mark.parametrize("columns", ["40", "80", "120", "0", "-3", "x", "1", "99999"])
def test_columns_are_those_of_the_environment(command, columns):
    result = invoke(*command, env={"COLUMNS": columns})
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if not line.startswith("assumed: ")]
    if columns in ("40", "80", "120"):
        least = 45 if command == PLAN else 60  # least width of the tables
        assert max(map(len, lines)) <= max(int(columns), least)
        assert columns == "40" or any(HEADERS[command[0]] in line.split() for line in lines)


@pytest.mark.slow
def test_a_dumb_terminal_has_lines(command_line):
    written = "\n".join(run_on_terminal(command_line, 80, *REPLAY, env={"TERM": "dumb"}))
    assert "passed" in written
    assert "\x1b" not in written


@pytest.mark.parametrize(
    ("command", "environment"),
    [*((c, ASCII) for c in (EXPLAIN, PLAN, ())), *((c, C_LOCALE) for c in (EXPLAIN, PLAN))],
)
def test_ascii_is_enough(command_line, command, environment):
    result = command_line.run(*command, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.isascii()
    assert "?" not in result.stdout
    assert "\\u" not in result.stdout
    if command == PLAN:
        assert "32/8 heads x 128" in result.stdout
        assert re.search("^-{50}", result.stdout, re.MULTILINE)
        assert result.stderr == "", "what is quick says nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "name", "shown"),
    [(ASCII, "träce.jsonl", r"tr\xe4ce.jsonl"), (C_LOCALE, "trace.jsonl", "trace.jsonl")],
)
def test_a_replay_without_colours_in_ascii(command_line, tmp_path, environment, name, shown):
    """Its files are in UTF-8; a name outside of ASCII is printed in another way."""
    trace, paths = tmp_path / name, (tmp_path / "r.json", tmp_path / "r.html")
    trace.write_text('{"timestamp":0,"input_length":640,"output_length":1,"hash_ids":[0,1]}\n')
    files = ("--trace", str(trace), "--json", str(paths[0]), "--html", str(paths[1]))
    environment = {**os.environ, **environment, "NO_COLOR": "1"}
    written = "\n".join(run_on_terminal(command_line, 80, *REPLAY, *files, env=environment))
    assert "passed" in written
    assert not COLOUR.search(written)
    assert written.isascii()
    assert "\\u" not in written
    assert f"{shown}: zigzag over 2 ranks" in written
    assert " · " in paths[1].read_bytes().decode("utf-8")
    assert paths[0].read_bytes().isascii()


def test_lines_say_what_was_told_last(capsys):
    """Lines come after a second, and then every ten."""
    lines = _progress.ProgressLines("cpattn replay", "prompt tokens")
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        if len(waited) == 2:
            lines(0, None, "measuring")
        return len(waited) == 3

    lines._end = mock.Mock(wait=wait)
    times = [91.0, 100.0, 101.0]
    with mock.patch.object(_progress.time, "monotonic", side_effect=times):
        lines._begin = 90.0
        lines._tick()
    assert waited == [1.0, 10.0, 10.0]
    assert capsys.readouterr().err.splitlines() == [
        "cpattn replay: 1 s: starting",
        "cpattn replay: 11 s: measuring",
    ]
    with mock.patch.object(_progress.time, "monotonic", side_effect=[200.0, 202.0, 202.0]):
        lines._begin = 190.0
        lines(0, 70_000, "batch 3: check")
        lines(20_000, 70_000, "batch 3: check")
        assert lines._line() == (
            "12 s: batch 3: check, 20,000 of 70,000 prompt tokens, 10,000/s, about 0:05 left"
        )


def test_a_table_leaves_out_what_matters_least():
    def printed(width: int) -> tuple[str, list[str]]:
        console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
        rows = [_tables.Row(["1", "22", "333"])]
        _, kept = _tables.print_table(
            "title", ["one", "two", "three"], rows, less_important=["two", "one"], console=console
        )
        return console.file.getvalue(), kept

    assert printed(40)[1] == ["one", "two", "three"]
    assert printed(13)[1] == ["one", "two", "three"]
    text, kept = printed(12)
    assert kept == ["one", "three"]
    assert "has no room for two" not in text
    assert "no room for two" in " ".join(text.split())
    assert printed(5)[1] == ["three"]


def test_pace_and_time_left():
    pace = _progress.Pace()
    assert pace.rate(0.0) is None
    pace.note(0, 10.0)  # processes took five seconds to start
    pace.note(0, 15.0)
    assert pace.seconds_left(1000, 16.0) is None
    pace.note(100, 17.0)
    assert pace.rate(17.0) == pytest.approx(50)
    assert pace.seconds_left(1000, 17.0) == pytest.approx(18)
    assert pace.seconds_left(None, 17.0) is None
    assert pace.rate(25.0) == pytest.approx(10), "it slows down while nothing is told"
    for second in range(18, 200):  # progress is faster now, and the first minute is forgotten
        pace.note(100 + 10 * (second - 17), float(second))
    assert 9.5 < pace.rate(199.0) < 10.5
    pace.note(0, 300.0)
    assert pace.rate(301.0) is None, "something else has begun"


def bar_at(width: int, unit: str, done: int, total: int | None) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    with mock.patch.object(_progress.time, "monotonic", return_value=100.0) as clock:
        progress = _progress.ProgressBar(console, unit)
        progress(0, total, "batch 3: attention")
        clock.return_value = 102.0
        progress(done, total, "batch 3: attention")
        console.print(progress._bar.get_renderable())
    return CONTROL.sub("", console.file.getvalue()).rstrip()


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100, 200])
def test_a_bar_says_how_fast_and_how_long(width):
    text = bar_at(width, "prompt tokens", 20_000, 70_000)
    assert len(text) <= width
    assert "\n" not in text
    assert "batch 3: attention" in text
    assert "0:05 left" in text
    assert ("29 %" in text) == (width < 80)
    assert ("20,000 of 70,000" in text) == (width >= 80)
    assert ("10,000/s" in text) == (width >= 80)
    assert ("prompt tokens" in text) == (width >= 100)
    endless = bar_at(width, "steps", 0, None)
    assert endless.endswith("0:00")
    assert "left" not in endless


def test_without_rich_there_are_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(_progress.make_progress("cpattn_lab.check"), _progress.ProgressLines)
