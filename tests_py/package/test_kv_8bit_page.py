# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/kv_8bit.md: its errors are those of now, and its code runs."""

from __future__ import annotations

import contextlib
import io
import re

import kv_8bit_errors
import pytest

EXAMPLE = re.compile(r'```python\n(.*?)^```\n\n```text title="Output"\n(.*?)^```\n', re.M | re.S)


@pytest.mark.slow
def test_the_page_has_the_errors_of_now(tmp_path, monkeypatch, capsys):
    found = kv_8bit_errors.errors()
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


def test_the_code_prints_what_the_page_shows():
    text = kv_8bit_errors.PAGE.read_text()
    names: dict[str, object] = {}
    examples = EXAMPLE.findall(text)
    assert len(examples) == text.count("```python\n") >= 2
    for code, output in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, "kv_8bit.md", "exec"), names)
        assert printed.getvalue() == output
