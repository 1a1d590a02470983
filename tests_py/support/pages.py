# SPDX-License-Identifier: Apache-2.0
"""Pages of the documents, run from top to bottom as by their reader.

Language and title tell the kind of a fenced block:

    sh                       commands in one folder, whose exports stay; "Set up" is not run
    python  title="x.py"     a file that the reader saves; in examples/, one that is there already
    diff    title="x.py"     a change of such a file
    text    title="Output…"  stdout of the commands before; after a comma there may be "exit code N"
                             and "your figures will differ": numbers are not compared
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from support.children import Children, path_with
from support.places import ROOT
from support.time_limits import PATIENCE

_FENCE = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[-+]?\d+)?( [nµm]?s\b)?")
_LEFT_OUT = "..."


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str

    @property
    def is_setup(self) -> bool:
        return self.title.startswith("Set up")

    @property
    def is_output(self) -> bool:
        return self.title.startswith("Output")

    @property
    def exit_code(self) -> int:
        found = re.search(r"exit code (\d+)", self.title)
        return int(found[1]) if found else 0


def blocks_in(page: Path) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(page.read_text())]


def without_numbers(text: str) -> str:
    """Return the text in one line with # for numbers and times, single spaces and thin rules."""
    return re.sub(r"[\s─━]+", " ", _NUMBER.sub("#", text)).strip()


def assert_printed(expected: Block, stdout: str) -> None:
    """Compare line by line; "..." in the page stands for any number of lines."""
    shown, printed = expected.text, stdout
    if "figures will differ" in expected.title:
        shown, printed = without_numbers(shown), without_numbers(printed)
    parts = re.split(rf"^{re.escape(_LEFT_OUT)}\n", shown, flags=re.MULTILINE)
    pattern = r"(?:.*\n)*?".join(map(re.escape, parts))
    assert re.fullmatch(pattern, printed), f"the page has\n{shown}\nprinted was\n{printed}"


def change(file: Path, diff: str) -> None:
    """Replace the lines with "-", which the file must have once, by the lines with "+"."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(x[1:] for x in lines if x[0] in f" {sign}") for sign in "-+")
    text = file.read_text()
    assert text.count(before) == 1, before
    file.write_text(text.replace(before, after))


def run_page(
    page: Path,
    folder: Path,
    children: Children,
    environment: Mapping[str, str] | None = None,
    *,
    sizes: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
) -> None:
    """Do what the page says in a folder with the examples, and compare the output.

    `sizes` maps text of the page to smaller numbers for a test.
    """
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": path_with(),
        **(environment or {}),
    }
    exports: list[str] = []
    blocks = blocks_in(page)
    for block, following in zip(blocks, [*blocks[1:], Block("", "", "")], strict=True):
        if block.title.startswith("examples/"):
            assert block.text == (ROOT / block.title).read_text(), f"{block.title} is another"
        elif block.language == "python":
            text = block.text
            for said, smaller in (sizes or {}).items():
                assert said in text, said
                text = text.replace(said, smaller)
            (folder / block.title).write_text(text)
        elif block.language == "diff":
            change(folder / block.title, block.text)
        elif block.language == "sh" and not block.is_setup:
            exports += re.findall(r"^export .+$", block.text, re.MULTILINE)
            script = "\n".join([*exports, "set -e", block.text])
            run = children.run(["sh", "-c", script], cwd=folder, env=environment, timeout=timeout)
            expected = following.exit_code if following.is_output else 0
            assert run.returncode == expected, f"{block.text}\n{run.stdout}\n{run.stderr}"
            if following.is_output:
                assert_printed(following, run.stdout)
