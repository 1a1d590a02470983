# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md and its pictures say what the sources say."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import architecture
import pytest

from support.places import ROOT

PAGE = ROOT / "docs" / "architecture.md"
IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))


def test_a_floor_that_knows_another_needs_an_arrow(monkeypatch):
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
