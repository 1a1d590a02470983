# SPDX-License-Identifier: Apache-2.0
"""Pages of docs/concepts are short, and their pictures show what the library does."""

import re
from xml.etree import ElementTree

import pytest
from concepts.canvas import Canvas

from cpattn_lab import cost_model
from support import chromium
from support.places import ROOT, TESTS

IMAGES = sorted((ROOT / "docs" / "images" / "concepts").glob("*.svg"))
NAMESPACE = "{http://www.w3.org/2000/svg}"
CONCEPTS = ROOT / "docs" / "concepts"
PAGES = sorted(path.stem for path in CONCEPTS.glob("*.md"))
WITHOUT_CODE = {"index", "glossary"}


def text_of(page):
    return CONCEPTS.joinpath(f"{page}.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_has_its_picture(page):
    text = text_of(page)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert len(prose.split()) < 420
    if page not in WITHOUT_CODE:
        assert "```python\n" in text
        assert text.count("```text") == text.count(
            '```\n\n```text title="Output"'
        )  # every text is an output
        assert f"](../images/concepts/{page}.svg)" in text
        assert re.search(r"\]\(\.\./(how_to|reference|tutorials|architecture)", text)
    assert all(len(words) > 20 for words in re.findall(r"!\[(.*?)\]", text))  # the blind read them


def test_every_page_is_listed_and_every_picture_shown():
    listed = re.findall(r"\]\((\w+)\.md\)", text_of("index"))
    assert sorted({*listed, "index"}) == PAGES
    shown = {name for page in PAGES for name in re.findall(r"concepts/(\w+)\.svg", text_of(page))}
    assert shown == {path.stem for path in IMAGES}


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
    words = ElementTree.fromstring(path.read_text()).iter(NAMESPACE + "text")
    shown = [word.text for word in words if word.text.endswith(" pairs")]
    expected = [
        f"{pairs} pairs"
        for strategy in ("zigzag", "contiguous")
        for pairs in cost_model.rank_work([24], [32], cp_size=4, strategy=strategy).pairs
    ]
    assert shown == expected


FINDINGS = (TESTS / "support" / "words_of_pictures.js").read_text()


@pytest.fixture(scope="module")
def page():
    with chromium.started() as browser, chromium.page_of(browser, IMAGES[0]) as page:
        yield page


def findings(page, path, scheme):
    page.emulate_media(color_scheme=scheme)
    page.goto(path.as_uri())
    return page.evaluate(FINDINGS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_words_are_in_their_boxes_apart_and_readable(page, path, scheme):
    assert findings(page, path, scheme) == []


def test_words_that_are_not_are_found(page, tmp_path):
    canvas = Canvas("A picture with faults", "Words leave their box, lie on each other or hatched.")
    canvas.rect(100, 20, 40, 20, "r0")
    canvas.text(120, 34, "longer than its box", anchor="middle")
    canvas.text(124, 36, "on top", anchor="middle")
    canvas.rect(250, 20, 100, 40, "hatch")
    canvas.text(300, 40, "hatched", anchor="middle")
    canvas.text(500, 40, "faint", "page")
    path = tmp_path / "faults.svg"
    path.write_text(canvas.finish())
    assert findings(page, path, "light") == [
        "longer than its box: leaves its box",
        "longer than its box: covers on top",
        "on top: leaves its box",
        "on top: covers longer than its box",
        'hatched: lies on url("#hatch")',
        "faint: contrast 1",
    ]
