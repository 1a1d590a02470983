# SPDX-License-Identifier: Apache-2.0
"""Pictures of the documents are what the scripts draw that name them."""

from __future__ import annotations

import sys

import architecture
import concept_pictures
import pytest


@pytest.fixture(params=[architecture, concept_pictures], ids=lambda script: script.__name__)
def script(request, monkeypatch, tmp_path):
    """It is to check copies of its pictures."""
    for path in request.param.IMAGES.glob("*.svg"):
        tmp_path.joinpath(path.name).write_text(path.read_text())
    monkeypatch.setattr(request.param, "IMAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["the script", "--check"])
    return request.param


def test_pictures_are_what_is_drawn(script, capsys, tmp_path):
    assert script.main() == 0, capsys.readouterr().out
    assert {path.stem for path in tmp_path.glob("*.svg")} == script.PICTURES.keys()


def test_a_stale_picture_is_found_and_left_alone(script, capsys, tmp_path):
    name = min(script.PICTURES)
    stale = tmp_path / f"{name}.svg"
    stale.write_text("<svg/>")
    assert script.main() == 1
    assert capsys.readouterr().out == (
        f"{name}.svg: out of date; run python scripts/{script.__name__}.py\n"
    )
    assert stale.read_text() == "<svg/>"


def test_a_missing_picture_is_written(script, monkeypatch, tmp_path):
    missing = tmp_path / f"{min(script.PICTURES)}.svg"
    drawn = missing.read_text()
    missing.unlink()
    monkeypatch.setattr(sys, "argv", ["the script"])
    assert script.main() == 0
    assert missing.read_text() == drawn
