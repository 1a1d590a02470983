# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/images say what the sources say."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").exists())
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))


@pytest.fixture
def architecture(monkeypatch, tmp_path):
    """The script, with copies of the pictures to write to."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import architecture

    for path in IMAGES:
        tmp_path.joinpath(path.name).write_text(path.read_text())
    monkeypatch.setattr(architecture, "IMAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["architecture.py", "--check"])
    return architecture


def test_pictures_are_those_of_the_sources(architecture, capsys):
    assert architecture.main() == 0, capsys.readouterr().out
    assert {path.stem for path in IMAGES} == architecture.PICTURES.keys()


def test_a_stale_picture_is_found_and_left_alone(architecture, capsys, tmp_path):
    stale = tmp_path / "floors.svg"
    stale.write_text("<svg/>")
    assert architecture.main() == 1
    assert capsys.readouterr().out.startswith("floors.svg: out of date")
    assert stale.read_text() == "<svg/>"


def test_a_missing_picture_is_written(architecture, monkeypatch, tmp_path):
    tmp_path.joinpath("amx.svg").unlink()
    monkeypatch.setattr(sys, "argv", ["architecture.py"])
    assert architecture.main() == 0
    assert tmp_path.joinpath("amx.svg").read_text() == architecture.pipeline()


def test_a_floor_that_knows_another_needs_an_arrow(architecture, monkeypatch):
    floors = [
        {**floor, "floors": ["kernels"]} if floor["name"] == "meta" else floor
        for floor in architecture.LAYERS["floor"]
    ]
    monkeypatch.setitem(architecture.LAYERS, "floor", floors)
    with pytest.raises(ValueError, match=r"arrows without a route.*'meta', 'kernels'"):
        architecture.floors()


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_pictures_are_well_formed(path):
    root = ElementTree.fromstring(path.read_text())
    assert int(root.attrib["width"]) <= 700
