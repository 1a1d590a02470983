# SPDX-License-Identifier: Apache-2.0
"""What tutorials, questions and answers, and troubleshooting name is there."""

from __future__ import annotations

import importlib
import re

import pytest

from support.places import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "faq.md", DOCS / "troubleshooting.md", *sorted((DOCS / "tutorials").glob("*.md"))]


def names_in(text: str) -> set[str]:
    """Dotted names of the package, but for those that an error message says are gone."""
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


def test_environment_variables_are_read():
    sources = "".join(
        path.read_text()
        for folder, kind in (("python/cpattn", "*.py"), ("cpp", "*.cc"))
        for path in (ROOT / folder).rglob(kind)
    )
    for page in PAGES:
        for name in set(re.findall(r"\bCPATTN_[A-Z_]+", page.read_text())):
            assert f'"{name}"' in sources, (page, name)


def test_a_name_that_is_not_there_is_found():
    assert names_in("`cpattn.nonsense()`, cpattn.kv.MHATokenToKVPool.") == {
        "cpattn.nonsense",
        "cpattn.kv.MHATokenToKVPool",
    }
    assert not resolves("cpattn.nonsense")
    assert resolves("cpattn.kv.MHATokenToKVPool")
