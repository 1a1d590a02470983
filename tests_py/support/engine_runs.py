# SPDX-License-Identifier: Apache-2.0
"""Runs modules of the tests in new interpreters, and engines that find the plug-in there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.children import path_with
from support.entry_points import write_distribution


def run_module(
    name: str, *arguments: Any, folders: tuple[Path, ...] = (), timeout: float, **environment: str
) -> str:
    """Return the output of a module; it finds these folders first, and must exit with 0."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", name, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": path_with(*folders)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def run_engines(name: str, runs: list[Any], folder: Path, **options: Any) -> tuple[list[Any], str]:
    """Return the results of a module that runs engines with the plug-in, and its log."""
    files, site = (folder / "runs.json", folder / "results.json"), folder / "site"
    files[0].write_text(json.dumps(runs))
    site.mkdir()
    write_distribution(site)
    log = run_module(name, *files, folders=(site,), **options)
    return json.loads(files[1].read_text()), log
