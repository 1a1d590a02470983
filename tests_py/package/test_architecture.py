# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md and its pictures say what the sources say."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from support.places import ROOT

PAGE = ROOT / "docs" / "architecture.md"
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
def test_pictures_are_well_formed_and_shown(path):
    root = ElementTree.fromstring(path.read_text())
    assert int(root.attrib["width"]) <= 700
    assert f"(images/{path.name})" in PAGE.read_text()


def paths_of(text: str) -> list[str]:
    """What looks like a path from the root, among the words in backticks."""
    words = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    return [
        word
        for word in words
        if re.fullmatch(r"\.?[\w*-]+(/[\w.*-]*)+|[\w-]+\.(md|toml|txt)", word)
        and not word.startswith("/")
    ]


def test_paths_of_the_page_exist():
    paths = paths_of(PAGE.read_text())
    assert len(paths) > 60
    assert [path for path in paths if not any(ROOT.glob(path))] == []


def test_links_of_the_page_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


def test_what_is_taken_for_a_path():
    text = "`cpp/base/isa.cc` `cpp/kernels/isa/dense_*.cc` `a / b` `x` ```\n`b/c`\n``` `CHANGES.md`"
    assert paths_of(text) == ["cpp/base/isa.cc", "cpp/kernels/isa/dense_*.cc", "CHANGES.md"]
