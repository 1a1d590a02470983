# SPDX-License-Identifier: Apache-2.0
"""docs/concepts: the code runs and prints what the pages show, and every page has its picture."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from support.places import ROOT

CONCEPTS = ROOT / "docs" / "concepts"
PAGES = sorted(path.stem for path in CONCEPTS.glob("*.md"))
WITHOUT_CODE = {"index", "glossary"}
EXAMPLE = re.compile(
    r'```python\n(.*?)^```\n(?:\n```text title="Output"\n(.*?)^```\n)?', re.M | re.S
)


def text_of(page: str) -> str:
    return CONCEPTS.joinpath(f"{page}.md").read_text()


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITHOUT_CODE])
def test_code_prints_what_the_page_shows(page):
    names: dict[str, object] = {}
    examples = EXAMPLE.findall(text_of(page))
    assert len(examples) == text_of(page).count("```python\n") >= 1
    assert sum(bool(output) for _, output in examples) == text_of(page).count("```text")
    for code, output in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"{page}.md", "exec"), names)
        assert printed.getvalue() == output


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_has_its_picture(page):
    text = text_of(page)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert len(prose.split()) < 420
    if page not in WITHOUT_CODE:
        assert f"](../images/concepts/{page}.svg)" in text
        assert re.search(r"\]\(\.\./(how_to|reference|tutorials|architecture)", text)
    assert all(len(words) > 20 for words in re.findall(r"!\[(.*?)\]", text))  # for who cannot see


def test_every_page_is_listed_and_every_picture_shown():
    listed = re.findall(r"\]\((\w+)\.md\)", text_of("index"))
    assert sorted({*listed, "index"}) == PAGES
    shown = {name for page in PAGES for name in re.findall(r"concepts/(\w+)\.svg", text_of(page))}
    assert shown == {path.stem for path in (ROOT / "docs/images/concepts").glob("*.svg")}


def test_the_glossary_is_in_order_and_explains_what_newcomers_asked_for():
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", text_of("glossary"), re.M)
    assert words == sorted(words, key=str.casefold)
    asked = {"context parallelism", "prefix", "extend", "block table", "zigzag", "prev", "FIA"}
    asked |= {"DSA", "baked", "bare", "DCP", "LSE"}
    assert not [word for word in asked if word not in " ".join(words)]
