# SPDX-License-Identifier: Apache-2.0
"""docs/proof/zoo.md: its table is what the tools say now."""

from __future__ import annotations

import re

import pytest

for name in ("torch", "hypothesis", "jsonschema"):
    pytest.importorskip(name)

import zoo_table  # noqa: E402


@pytest.mark.slow
def test_the_table_is_what_the_tools_say(tmp_path, monkeypatch, capsys):
    assert zoo_table.main(["--check"]) == 0
    page = tmp_path / "zoo.md"
    page.write_text(zoo_table.PAGE.read_text().replace("on no rank", "on a rank"))
    monkeypatch.setattr(zoo_table, "PAGE", page)
    assert zoo_table.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("zoo.md: out of date; run python scripts/zoo_table.py\n")
    assert "on a rank" in said
    assert zoo_table.main([]) == 0
    written = zoo_table.comparable(page.read_text())
    assert "on no rank" in written


def test_the_changelog_counts_the_bugs():
    from cpattn.proof.zoo.registry import all_entries

    text = (zoo_table.PAGE.parents[2] / "CHANGELOG.md").read_text()
    (count,) = re.findall(r"`python -m cpattn\.proof\.zoo`: (\d+) bugs", text)
    assert len({entry.bug for entry in all_entries()}) == int(count)
