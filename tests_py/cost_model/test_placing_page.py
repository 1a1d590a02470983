# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/placing_keys.md: what it shows comes out, and what it says of it is so."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest

from cpattn_lab.cost_model import exchange_work
from support.command_line import invoke
from support.places import ROOT

PAGE = (ROOT / "docs" / "how_to" / "placing_keys.md").read_text("utf-8")
CONSOLE = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", PAGE, re.M | re.S)
EXAMPLE = re.compile(r'^```python\n(.*?)^```\n\n```text title="Output"\n(.*?)^```$', re.M | re.S)


@pytest.mark.parametrize(("command", "shown"), CONSOLE)
def test_commands_print_what_the_page_shows(command, shown):
    result = invoke(*shlex.split(command)[1:], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == shown.splitlines()


@pytest.fixture(scope="module")
def example():
    ((code, shown),) = EXAMPLE.findall(PAGE)
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "placing_keys.md", "exec"), names)
    assert printed.getvalue() == shown
    return shown, names


def test_the_prediction_of_the_published_system_is_in_the_table(example):
    shown, _ = example
    cells = [line.split("|")[2].strip() for line in PAGE.splitlines() if "new |" in line]
    differences = re.findall(r"pass_q +([-+]\d+) ms", shown)
    assert [cell.replace(",", "").removesuffix(" ms") for cell in cells] == differences
    short, long = re.findall(r"tokens: +([\d.]+) s, ([\d.]+)%", shown)
    assert f"| 1M tokens, 16 hosts | {float(long[0]):.1f} s |" in PAGE
    assert f"| 128K tokens, 16 hosts | {float(short[0]):.1f} s |" in PAGE
    assert f"| {long[1]} % | 93 %" in PAGE


def test_the_parts_of_a_step_are_as_the_page_says(example):
    _, names = example
    predict, layer, rates = names["predict"], names["layer"], names["rates"]
    told = []
    for new in (3200, 12800):
        ring, pass_q = (
            predict([([new], [128_000])], layer, rates, cp_size=4, exchange=way, **names["placed"])
            for way in ("ring", "pass_q")
        )
        placed = {"placement": "token_interleave", "exchange": "ring"}
        work = exchange_work([new], [128_000], cp_size=4, layer=layer, **placed)
        before = 80e-6 + int(work.wire_bytes[0].max()) / 26e9  # digests, and rows to their pools
        keys = (ring.slowest_gather_seconds - before) / 3
        queries = 40e-6 + new // 4 * 3 * 16 * 256 / 26e9
        states = pass_q.slowest_gather_seconds - before - queries
        told.append([round(1e6 * s) for s in (keys, ring.slowest_attention_seconds / 4, states)])
    (keys, first, states), (_, second, more_states) = told
    text = " ".join(PAGE.split())
    assert f"(predicted {keys})" in text
    assert f"({first} and {second:,})" in text
    assert f"({states} and {more_states:,})" in text
