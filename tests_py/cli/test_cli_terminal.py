# SPDX-License-Identifier: Apache-2.0
"""What commands look like: on terminals of any width, without one, without colours, in ASCII."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from unittest import mock

import pytest

pytest.importorskip("click")
pytest.importorskip("torch")
Console = pytest.importorskip("rich.console").Console

from cpattn._cli import progress as _progress  # noqa: E402
from cpattn._cli import tables as _tables  # noqa: E402
from support.command_line import QUICK, CommandLine, run_on_terminal  # noqa: E402

EXPLAIN = ("explain", "--lens", "12500000,13", "--prefix", "0,900", "--cp-size", "4")
PLAN = ("plan", "--cp-size", "8,16")
REPLAY = (*QUICK, "--requests=4")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3|4|9|10)[0-7][;m]")


def visible(lines: list[str]) -> list[str]:
    """What stays on the screen of lines with control sequences."""
    # A line of the bar is erased where the next one begins.
    return [CONTROL.sub("", line.split("\x1b[2K")[-1]).rstrip() for line in lines]


@pytest.mark.parametrize(
    ("command", "columns"),
    [
        *((command, columns) for command in (EXPLAIN, PLAN) for columns in (60, 80, 120)),
        *((command, columns) for command in ((), ("doctor",)) for columns in (60, 120)),
        (REPLAY, 60),
        pytest.param(REPLAY, 80, marks=pytest.mark.slow),
        pytest.param(REPLAY, 120, marks=pytest.mark.slow),
    ],
)
def test_a_terminal_is_not_too_narrow(
    command_line: CommandLine, command: tuple[str, ...], columns: int
) -> None:
    lines = visible(run_on_terminal(command_line, columns, *command))
    text = "\n".join(lines)
    assert "Traceback" not in text
    assert "…" not in text
    report = [line for line in lines if not re.match("cpattn (plan|replay): |assumed: ", line)]
    assert max(map(len, report)) <= columns
    headers = {"explain": "pairs", "plan": "attention", "replay": "error", "doctor": "threads"}
    header = headers[command[0]] if command else "Commands:"
    assert any(header in line.split() for line in lines)


@pytest.mark.parametrize("command", [EXPLAIN, PLAN], ids=lambda command: command[0])
def test_columns_are_those_of_the_environment(
    command_line: CommandLine, command: tuple[str, ...]
) -> None:
    result = command_line.run(*command, env={**os.environ, "COLUMNS": "40"})
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("assumed")]
    table = 45 if command == PLAN else 60  # what is left of the tables at least
    assert max(map(len, lines)) <= table
    for absurd in ("0", "-3", "x", "1", "99999"):
        result = command_line.run(*command, env={**os.environ, "COLUMNS": absurd})
        assert result.returncode == 0, result.stderr


def test_no_color_is_no_colour(command_line: CommandLine) -> None:
    for environment, colours in (({}, True), ({"NO_COLOR": "1"}, False)):
        written = "\n".join(run_on_terminal(command_line, 80, *REPLAY, env=environment))
        assert "passed" in written
        assert bool(COLOUR.search(written)) == colours


def test_a_dumb_terminal_has_lines(command_line: CommandLine) -> None:
    written = "\n".join(run_on_terminal(command_line, 80, *REPLAY, env={"TERM": "dumb"}))
    assert "passed" in written
    assert "\x1b" not in written


ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        *((c, e) for c in (EXPLAIN, PLAN, ("doctor",), ()) for e in (ASCII, C_LOCALE)),
        (REPLAY, ASCII),
    ],
)
def test_ascii_is_enough(
    command_line: CommandLine, command: tuple[str, ...], environment: dict[str, str]
) -> None:
    result = command_line.run(*command, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.isascii()
    assert "?" not in result.stdout
    assert "\\u" not in result.stdout
    if command == PLAN:
        assert "32/8 heads x 128" in result.stdout
        assert re.search("^-{50}", result.stdout, re.MULTILINE)


def test_files_are_utf_8_in_any_locale(command_line: CommandLine, tmp_path) -> None:
    paths = tmp_path / "r.json", tmp_path / "r.html"
    files = ("--json", str(paths[0]), "--html", str(paths[1]))
    result = command_line.run(*REPLAY, *files, env={**os.environ, **C_LOCALE})
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert " · " in paths[1].read_bytes().decode("utf-8")
    assert paths[0].read_bytes().isascii()


def test_a_name_that_ascii_has_not(command_line: CommandLine, tmp_path) -> None:
    trace = tmp_path / "träce.jsonl"
    trace.write_text('{"timestamp":0,"input_length":640,"output_length":1,"hash_ids":[0,1]}\n')
    result = command_line.run(
        *REPLAY, "--trace", str(trace), env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert result.returncode == 0, result.stderr
    assert r"tr\xe4ce.jsonl: zigzag over 2 ranks" in result.stdout


def test_a_log_gets_a_line_every_ten_seconds(command_line: CommandLine) -> None:
    running = command_line.start("replay", "--requests", "3000", "--no-check")
    line = running.process.stderr.readline()
    while line.startswith("ONEDNN"):  # what torch was told
        line = running.process.stderr.readline()
    begin = time.monotonic()
    assert re.match(r"cpattn replay: \d s: ", line), line
    line = running.process.stderr.readline()
    assert time.monotonic() - begin > 9
    assert re.match(r"cpattn replay: 1\d s: .*[\d,]+ of [\d,]+ prompt tokens", line)
    running.interrupt()
    _, rest = running.process.communicate(timeout=60)
    assert rest.splitlines()[-1] == "cpattn replay: interrupted, all processes ended"


def test_a_terminal_shows_what_a_batch_is_at(command_line: CommandLine) -> None:
    running = command_line.start("replay", "--requests", "30", "--layers", "8", columns=100)
    seen = running.read_until(b"batch 0: check")
    text = CONTROL.sub("", seen.decode(errors="replace"))
    assert "processes are ready" in text
    done = [int(n.replace(",", "")) for n in re.findall(r"batch 0: attention\D*?([\d,]+) of", text)]
    assert done == sorted(done)
    assert len(set(done)) > 2, done


def test_lines_say_what_was_told_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_progress, "SECONDS_TO_FIRST_LINE", 0.05)
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", 0.05)
    begin = time.monotonic()
    with _progress.ProgressLines("cpattn plan") as progress:
        time.sleep(0.12)
        progress(0, None, "measuring")
        time.sleep(0.12)
    passed = time.monotonic() - begin
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "cpattn plan: 0 s: starting"
    assert lines[-1] == "cpattn plan: 0 s: measuring"
    assert 2 <= len(lines) <= passed / 0.05


def test_a_table_leaves_out_what_matters_least() -> None:
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


def test_pace_and_time_left() -> None:
    pace = _progress.Pace()
    assert pace.rate(0.0) is None
    pace.note(0, 10.0)  # five seconds until processes have started
    pace.note(0, 15.0)
    assert pace.seconds_left(1000, 16.0) is None
    pace.note(100, 17.0)
    assert pace.rate(17.0) == pytest.approx(50)
    assert pace.seconds_left(1000, 17.0) == pytest.approx(18)
    assert pace.seconds_left(None, 17.0) is None
    assert pace.rate(25.0) == pytest.approx(10), "it slows down while nothing is told"
    for second in range(18, 200):  # faster from here on: the first minute is forgotten
        pace.note(100 + 10 * (second - 17), float(second))
    assert 9.5 < pace.rate(199.0) < 10.5
    pace.note(0, 300.0)
    assert pace.rate(301.0) is None, "something else has begun"


def bar_at(width: int, unit: str, done: int, total: int | None) -> str:
    """What a bar shows after two seconds of something."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    with mock.patch.object(_progress.time, "monotonic", return_value=100.0) as clock:
        progress = _progress.ProgressBar(console, unit)
        progress(0, total, "batch 3: attention")
        clock.return_value = 102.0
        progress(done, total, "batch 3: attention")
        console.print(progress._bar.get_renderable())
    return CONTROL.sub("", console.file.getvalue()).rstrip()


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100, 200])
def test_a_bar_says_how_fast_and_how_long(width: int) -> None:
    text = bar_at(width, "prompt tokens", 20_000, 70_000)
    assert len(text) <= width
    assert "\n" not in text
    assert "batch 3: attention" in text
    assert "0:05 left" in text
    assert ("29 %" in text) == (width < 80)
    assert ("20,000 of 70,000" in text) == (width >= 80)
    assert ("10,000/s" in text) == (width >= 80)
    assert ("prompt tokens" in text) == (width >= 100)


def test_a_bar_of_what_has_no_end_shows_the_time() -> None:
    text = bar_at(80, "steps", 0, None)
    assert text.endswith("0:00")
    assert "left" not in text


def test_a_line_says_how_fast_and_how_long() -> None:
    lines = _progress.ProgressLines("cpattn replay", "prompt tokens")
    with mock.patch.object(_progress.time, "monotonic", side_effect=[100.0, 102.0, 102.0]):
        lines._begin = 90.0
        lines(0, 70_000, "batch 3: check")
        lines(20_000, 70_000, "batch 3: check")
        text = lines._line()
    assert text == (
        "12 s: batch 3: check, 20,000 of 70,000 prompt tokens, 10,000/s, about 0:05 left"
    )


def test_what_is_quick_says_nothing(command_line: CommandLine) -> None:
    assert command_line.run("plan", "--cp-size", "2").stderr == ""


def test_without_rich_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(_progress.make_progress("cpattn.distributed.check"), _progress.ProgressLines)
