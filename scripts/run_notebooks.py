# SPDX-License-Identifier: Apache-2.0
"""Executes notebooks from beginning to end; with --write, stores what they print and draw.

    PYTHONPATH=build/release/python python scripts/run_notebooks.py --write notebooks/*.ipynb

Exit code 1 and the cell's error if one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def run(path: Path, write: bool) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",  # of the interpreter that runs this
        record_timing=False,
    ).execute()
    if write:
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebooks")
    options = parser.parse_args()
    for path in options.notebooks:
        begin = time.perf_counter()
        try:
            run(path, options.write)
        except CellExecutionError as error:
            sys.exit(f"{path}: {error}")
        print(f"{path}: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
