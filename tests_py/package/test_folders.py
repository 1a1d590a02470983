# SPDX-License-Identifier: Apache-2.0
"""The folders of tests are small, and so are their files."""

from __future__ import annotations

from pathlib import Path

from support.places import TESTS

MOST_FILES = 20
MOST_LINES = 400  # as test_cpp_layers.py has it for C++

FILES = [path for path in TESTS.rglob("*.py") if "corpus" not in path.parts]
FOLDERS = sorted({path.parent for path in FILES})


def complaints(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.py"))
    found = [f"{len(files)} files"] if len(files) > MOST_FILES else []
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    return found + [f"{name}: {n} lines" for name, n in lengths.items() if n > MOST_LINES]


def test_a_folder_and_its_files_are_small():
    found = {str(folder): complaints(folder) for folder in FOLDERS}
    assert {folder: lines for folder, lines in found.items() if lines} == {}


def test_what_is_too_large_is_found(tmp_path):
    (tmp_path / "test_long.py").write_text("\n" * 401)
    assert complaints(tmp_path) == ["test_long.py: 401 lines"]
    for number in range(20):
        (tmp_path / f"test_{number}.py").touch()
    assert complaints(tmp_path) == ["21 files", "test_long.py: 401 lines"]


def test_tests_are_in_folders_and_import_no_other_test():
    assert {path.name for path in TESTS.glob("*.py")} == {"conftest.py"}
    importing = [
        path.name
        for path in FILES
        for line in path.read_text().splitlines()
        if line.startswith(("from test_", "import test_"))
    ]
    assert importing == []
