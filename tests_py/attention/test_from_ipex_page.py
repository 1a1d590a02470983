# SPDX-License-Identifier: Apache-2.0
"""docs/how_to/from_ipex.md: its program runs, and its calls have arguments that exist."""

import inspect
import re

import cpattn
from cpattn.kv import write_pages
from support.pages import run_page
from support.places import ROOT

PAGE = ROOT / "docs" / "how_to" / "from_ipex.md"


def test_the_program(tmp_path, children):
    run_page(PAGE, tmp_path, children)


def test_calls_of_the_table():
    """All names in the right column are arguments, in the order of the function."""
    calls = re.findall(r"`cpattn\.([\w.]+)\(([^`]*)\)` \|", PAGE.read_text())
    assert [name for name, _ in calls] == ["kv.write_pages", "paged_attention", "paged_attention"]
    for name, arguments in calls:
        function = write_pages if name.startswith("kv.") else cpattn.paged_attention
        words = re.split(r", (?![^\[(]*[\])])", arguments)
        keywords = [word.split("=")[0] for word in words if "=" in word]
        inspect.signature(function).bind(*words[: -len(keywords)], **dict.fromkeys(keywords))
