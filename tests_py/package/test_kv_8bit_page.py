# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/kv_8bit.md: its errors are those of now, what it says is so, and its code runs."""

from __future__ import annotations

import contextlib
import io
import re

import kv_8bit_errors
import pytest

EXAMPLE = re.compile(r'```python\n(.*?)^```\n\n```text title="Output"\n(.*?)^```\n', re.M | re.S)
OF_TOKENS = "token and head, float16"


@pytest.fixture(scope="module")
def found():
    return kv_8bit_errors.errors()


def mean(found, data, dtype, scales):
    return found[dtype, scales][data].mean


@pytest.mark.slow
def test_the_page_has_the_errors_of_now(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv_8bit_errors, "errors", lambda: found)
    assert kv_8bit_errors.main(["--check"]) == 0, capsys.readouterr().out
    page = tmp_path / "kv_8bit.md"
    text = kv_8bit_errors.PAGE.read_text()
    page.write_text(text.replace("| int8 | head |", "| int8 | tail |"))
    monkeypatch.setattr(kv_8bit_errors, "PAGE", page)
    assert kv_8bit_errors.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert kv_8bit_errors.main([]) == 0
    assert page.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("data", [0, 1], ids=["normal", "heavy"])
def test_what_the_page_says_of_the_formats(found, data):
    eight_bits = {
        format: pair[data].mean for format, pair in found.items() if "16" not in format[0]
    }
    best = mean(found, data, "int8", OF_TOKENS)
    others = [error for (dtype, of), error in eight_bits.items() if not of.startswith("token")]
    assert all(best < error for error in others)
    assert best < mean(found, data, "float8_e4m3fn", OF_TOKENS)
    exact = mean(found, data, "int8", "token and head, float32")
    assert round(best / exact, 1) == 1
    for scales in ("none", "tensor", "head", OF_TOKENS):
        ratio = mean(found, data, "float8_e5m2", scales) / mean(
            found, data, "float8_e4m3fn", scales
        )
        assert round(ratio) == 2
    ratio = mean(found, data, "float8_e4m3fn", "none") / mean(found, data, "bfloat16", "none")
    assert round(ratio) == 16
    normal, heavy = found["int8", "tensor"]
    assert heavy.mean > 5 * normal.mean, "heavy channels take most steps of int8"


def test_the_code_prints_what_the_page_shows():
    text = kv_8bit_errors.PAGE.read_text()
    names: dict[str, object] = {}
    examples = EXAMPLE.findall(text)
    assert len(examples) == text.count("```python\n") >= 2
    for code, output in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "kv_8bit.md", "exec"), names)
        assert printed.getvalue() == output
