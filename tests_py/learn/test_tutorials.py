# SPDX-License-Identifier: Apache-2.0
"""The tutorials, followed like by readers; integrations has the tutorials in engines."""

import importlib
import json
import re

import pytest

from support.pages import Block, assert_printed, blocks_in, change, run_page
from support.places import ROOT
from support.transfer.transfer_processes import requires_mooncake

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


def test_what_a_page_says_otherwise_is_noticed(tmp_path, children):
    block = Block("text", "Output", "a 1\n...\nc 3\n")
    assert_printed(block, "a 1\nb\nc 3\n")
    for printed in ("", "a 1\n", "a 1\nb\nc 3\nd\n", "a 2\nb\nc 3\n"):
        with pytest.raises(AssertionError, match="printed was"):
            assert_printed(block, printed)
    page, file = tmp_path / "page.md", tmp_path / "a.py"
    page.write_text("```sh\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError, match="false"):
        run_page(page, tmp_path, children)
    file.write_text("a\nb\n")
    with pytest.raises(AssertionError, match="c"):
        change(file, "-c\n+d\n")


def test_a_tutorial_has_all_that_it_promises():
    """Time and needs come first; every command is in a block that is run."""
    links = re.findall(r"\]\((\w+\.md)\)", (FOLDER / "index.md").read_text())
    assert sorted(set(links)) == [page.name for page in TUTORIALS]
    for page in TUTORIALS:
        text = page.read_text()
        lead = text.split("\n## ")[0]
        assert re.search(r"^\*\*\w+ minutes", lead, re.MULTILINE), page
        assert "You need" in lead
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert (headings[0], *headings[-2:]) == ("Set up", "What you saw", "Where next"), page
        blocks = blocks_in(page)
        assert len(blocks) == text.count("\n```") / 2
        assert {block.language for block in blocks} <= {"sh", "python", "diff", "text"}
        assert all(block.title for block in blocks if block.language != "sh")
        texts = [block for block in blocks if block.language == "text"]
        assert len(texts) >= 2
        assert all(block.is_output for block in texts)


#: Packages that pages need beyond NumPy; integrations has the pages of engines.
NEEDS = {
    "prove_your_own": ("torch", "click", "hypothesis", "jsonschema"),
    "check_your_own": (),
    "context_parallel": ("torch",),
    "model_over_ranks": ("torch", "transformers", "uvicorn", "starlette", "openai"),
    "profiling": ("torch",),  # it comes with the packages for plots
    "move_kv": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_tutorial_does_what_it_shows(name, tmp_path, children):
    for package in NEEDS[name]:
        pytest.importorskip(package)
    if name == "move_kv":
        requires_mooncake()
    run_page(FOLDER / f"{name}.md", tmp_path, children)
    if name == "profiling":
        assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


PAGES = [
    ROOT / "docs" / "faq.md",
    ROOT / "docs" / "troubleshooting.md",
    *TUTORIALS,
    FOLDER / "index.md",
]


def names_in(text: str) -> set[str]:
    """Return dotted names of the package, without those that an error message calls removed."""
    prose = re.sub(r'^```text title="Message".*?^```$', "", text, flags=re.M | re.S)
    return set(re.findall(r"\bcpattn(?:\.[a-z_]\w*)+", prose, re.IGNORECASE)) - {"cpattn.git"}


def resolves(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        home, _, last = name.rpartition(".")
        return bool(home) and hasattr(importlib.import_module(home), last)
    return True


def test_names_resolve():
    pytest.importorskip("torch")
    names = {name for page in PAGES for name in names_in(page.read_text())}
    assert [name for name in sorted(names) if not resolves(name)] == []


def test_environment_variables_are_those_of_the_command_line_page():
    known = (ROOT / "docs" / "command_line.md").read_text()  # its tests find them in sources
    for page in PAGES:
        assert all(f"`{name}`" in known for name in re.findall(r"CPATTN_[A-Z_]+", page.read_text()))
