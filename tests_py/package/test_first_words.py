# SPDX-License-Identifier: Apache-2.0
"""scripts/first_words.py finds docstrings and C++ comments that begin without a subject."""

from __future__ import annotations

import first_words

RULES = 'words = ["Of", "The same", "This"]\n[allowed]\n"This rank" = "a name"\n'
PYTHON = '''"""of a module"""
class Pool:
    """This rank's pool."""
    def size(self):
        """Return
        of what."""
    size = """Of no docstring."""
Pool.__doc__ = """The
  same."""
'''
CPP = """/// The size
/// of which the second line begins so
int size();  // Of a comment beside code
/// Of-a-word, oftentimes.
int words();
/// This, too.
"""
FAULTS = """cpp/meta/pool.h:6: begins with 'This': This, too.
python/cpattn/kv/pool.py:1: begins with 'of': of a module
python/cpattn/kv/pool.py:8: begins with 'The same': The same.
"""


def test_each_place_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "rules.toml").write_text(RULES)
    monkeypatch.setattr(first_words, "ROOT", tmp_path)
    monkeypatch.setattr(first_words, "RULES", tmp_path / "rules.toml")
    for name, text in {"python/cpattn/kv/pool.py": PYTHON, "cpp/meta/pool.h": CPP}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert first_words.main() == 1
    said = capsys.readouterr().out
    assert [line for line in FAULTS.splitlines() if line not in said] == []
    assert said.count("begins with") == 3
    (tmp_path / "rules.toml").write_text('words = ["Behind"]\n[allowed]\n')
    assert first_words.main() == 0
