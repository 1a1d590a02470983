# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/concepts are what the library's plans, pools and transfers say."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

import concept_pictures
import pytest

from cpattn import cost_model
from support.places import ROOT

IMAGES = sorted((ROOT / "docs" / "images" / "concepts").glob("*.svg"))
NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """It, with copies of the pictures to write to."""
    for path in IMAGES:
        tmp_path.joinpath(path.name).write_text(path.read_text())
    monkeypatch.setattr(concept_pictures, "IMAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["concept_pictures.py", "--check"])
    return concept_pictures


def test_pictures_are_those_of_the_library(script, capsys):
    assert script.main() == 0, capsys.readouterr().out
    assert {path.stem for path in IMAGES} == script.PICTURES.keys()


def test_a_stale_picture_is_found_and_left_alone(script, capsys, tmp_path):
    stale = tmp_path / "zigzag_prefix.svg"
    stale.write_text("<svg/>")
    assert script.main() == 1
    assert capsys.readouterr().out.startswith("zigzag_prefix.svg: out of date")
    assert stale.read_text() == "<svg/>"


def test_a_missing_picture_is_written(script, monkeypatch, tmp_path):
    drawn = tmp_path.joinpath("zigzag_prefix.svg").read_text()
    tmp_path.joinpath("zigzag_prefix.svg").unlink()
    monkeypatch.setattr(sys, "argv", ["concept_pictures.py"])
    assert script.main() == 0
    assert tmp_path.joinpath("zigzag_prefix.svg").read_text() == drawn


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_pictures_are_well_formed_and_described(path):
    root = ElementTree.fromstring(path.read_text())
    assert int(root.attrib["width"]) <= 700
    assert root.attrib["role"] == "img"
    title, description = (root.findtext(NAMESPACE + name) for name in ("title", "desc"))
    assert len(title) > 10
    assert len(description) > 60


def test_the_bars_are_the_pairs_of_the_ranks():
    (path,) = (path for path in IMAGES if path.stem == "zigzag_prefix")
    words = [
        text.text for text in ElementTree.fromstring(path.read_text()).iter(NAMESPACE + "text")
    ]
    shown = [word for word in words if word.endswith(" pairs")]
    expected = [
        f"{pairs} pairs"
        for strategy in ("zigzag", "contiguous")
        for pairs in cost_model.rank_work([24], [32], cp_size=4, strategy=strategy).pairs
    ]
    assert shown == expected
