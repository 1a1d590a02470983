# SPDX-License-Identifier: Apache-2.0
"""The tutorials, done as their readers do them; those in engines are in integrations."""

from __future__ import annotations

import json
import re

import pytest

from support.pages import Block, assert_printed, blocks_in, change, run_page
from support.places import ROOT
from support.transfer.transfer_processes import requires_mooncake

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


def test_a_page_is_run_from_top_to_bottom(tmp_path, children):
    page = tmp_path / "page.md"
    page.write_text(
        '```sh title="Set up"\nfalse\n```\n'
        '```python title="a.py"\nimport os\nprint(os.environ["NAME"], "took 12 s")\nexit(3)\n```\n'
        "```sh\nexport NAME='a b'\n```\n"
        "```sh\npython a.py\n```\n"
        '```text title="Output, exit code 3, your figures will differ"\na b took 1.5 s\n```\n'
        '```diff title="a.py"\n-exit(3)\n+exit(0)\n```\n'
        '```sh\npython a.py\necho more\n```\n```text title="Output"\na b took 12 s\n...\n```\n'
    )
    (tmp_path / "folder").mkdir()
    run_page(page, tmp_path / "folder", children)


@pytest.mark.parametrize("printed", ["", "a 1\n", "a 1\nb\nc 3\nd\n", "a 2\nb\nc 3\n"])
def test_another_output_is_noticed(printed):
    block = Block("text", "Output", "a 1\n...\nc 3\n")
    assert_printed(block, "a 1\nb\nc 3\n")
    with pytest.raises(AssertionError, match="printed was"):
        assert_printed(block, printed)


def test_a_failing_command_is_noticed(tmp_path, children):
    page = tmp_path / "page.md"
    page.write_text("```sh\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError, match="false"):
        run_page(page, tmp_path, children)


def test_a_change_of_other_lines_is_noticed(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("a\nb\n")
    with pytest.raises(AssertionError, match="c"):
        change(file, "-c\n+d\n")


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_has_all_that_it_promises(page):
    """How long it takes and what it needs come first; every command is a block that is run."""
    text = page.read_text()
    lead = text.split("\n## ")[0]
    assert re.search(r"^\*\*\w+ minutes", lead, re.MULTILINE)
    assert "You need" in lead
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "Set up"
    assert headings[-2:] == ["What you saw", "Where next"]
    blocks = blocks_in(page)
    assert len(blocks) == text.count("\n```") / 2
    assert {block.language for block in blocks} <= {"sh", "python", "diff", "text"}
    assert all(block.title for block in blocks if block.language != "sh")
    outputs = [block for block in blocks if block.is_output]
    assert len(outputs) >= 2
    assert {block.title for block in blocks if block.language == "text"} == {
        block.title for block in outputs
    }


def test_the_index_lists_all_tutorials():
    links = re.findall(r"\]\((\w+\.md)\)", (FOLDER / "index.md").read_text())
    assert sorted(set(links)) == [page.name for page in TUTORIALS]


def test_prove_your_own(tmp_path, children):
    for name in ("torch", "click", "hypothesis", "jsonschema"):
        pytest.importorskip(name)
    run_page(FOLDER / "prove_your_own.md", tmp_path, children)


def test_check_your_own(tmp_path, children):
    run_page(FOLDER / "check_your_own.md", tmp_path, children)


@pytest.mark.slow
def test_context_parallel(tmp_path, children):
    pytest.importorskip("torch")
    run_page(FOLDER / "context_parallel.md", tmp_path, children)


@pytest.mark.slow
def test_profiling(tmp_path, children):
    pytest.importorskip("torch")  # which comes with what draws
    run_page(FOLDER / "profiling.md", tmp_path, children)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_move_kv(tmp_path, children):
    requires_mooncake()
    run_page(FOLDER / "move_kv.md", tmp_path, children)
