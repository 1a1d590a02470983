# SPDX-License-Identifier: Apache-2.0
"""scripts/first_words.py finds docstrings and C++ comments that begin without a subject."""

from __future__ import annotations

import first_words
import pytest

RULES = {"words": ["Of", "The same", "This"], "allowed": {"This rank": "a name"}}
PYTHON = '''"""{}"""
class Pool:
    """A pool."""
    def size(self):
        """Return
        of what."""
    size = """Of no docstring."""
Pool.__doc__ = """{}"""
'''
CPP = """/// {}
/// of which the second line begins so
int size();  // Of a comment beside code
/// {}
"""


@pytest.fixture
def faults(tmp_path):
    """Write a file of each language, and return what is found in them."""

    def found(python=("A module.", "A pool."), cpp=("The size.", "More."), **rules):
        for name, text, parts in (
            ("python/cpattn/kv/pool.py", PYTHON, python),
            ("cpp/meta/pool.h", CPP, cpp),
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(*parts))
        return first_words.faults(tmp_path, RULES | rules)

    return found


def test_whole_sentences_pass(faults):
    allowed = ("This rank's pool.", "Of-a-word, oftentimes.")
    assert faults() == faults(allowed, allowed) == []


@pytest.mark.parametrize(
    ("word", "text"),
    [("Of", "Of a pool."), ("of", "of a pool"), ("The same", "The same."), ("This", "This, too.")],
)
def test_each_place_is_found(faults, word, text):
    said = f"begins with {word!r}: {text}"
    assert faults((text, "A pool.")) == [f"python/cpattn/kv/pool.py:1: {said}"]
    assert faults(("A module.", text.replace(" ", "\n  "))) == [
        f"python/cpattn/kv/pool.py:8: {said}"
    ]
    assert faults(cpp=("The size.", text)) == [f"cpp/meta/pool.h:4: {said}"]


def test_the_command_fails_if_anything_is_found(faults, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_words, "ROOT", tmp_path)
    faults()
    rules = tmp_path / "rules.toml"
    rules.write_text('words = ["Of"]\n[allowed]\n')
    monkeypatch.setattr(first_words, "RULES", rules)
    assert first_words.main() == 0
    faults(("Of a module.", "A pool."))
    assert first_words.main() == 1
    assert "pool.py:1: begins with 'Of': Of a module." in capsys.readouterr().out
