# SPDX-License-Identifier: Apache-2.0
"""Runs of pytest within a test: small files of tests under the hooks of `audit`."""

import os
import subprocess
import sys
from pathlib import Path

from support.children import Children, path_with
from support.places import TESTS

CONFTEST = """
from pathlib import Path
import pytest
from audit import durations, leftovers, records, skips, table

skips.LIST = Path(__file__).with_name("allowed_skips.toml")
leftovers.PATIENCE = 1.0
PARTS = (skips, records, table, durations, leftovers)

def pytest_addoption(parser):
    for part in PARTS[:4]:
        part.add_options(parser)

def pytest_configure(config):
    for part in PARTS:
        part.configure(config)
"""


class InnerRuns:
    def __init__(self, folder: Path, children: Children) -> None:
        self.folder = folder
        self._children = children
        self.write(conftest=CONFTEST)
        self.allow("")

    def write(self, **modules: str) -> None:
        for name, text in modules.items():
            (self.folder / f"{name}.py").write_text(text)

    def allow(self, text: str) -> None:
        (self.folder / "allowed_skips.toml").write_text(text)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # Options of the outer run stay out, and that it may be a worker of xdist.
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CPATTN_"))}
        inner = {"PYTHONPATH": path_with(TESTS)}
        inner["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plug-ins take longer to import than to use
        command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "-rsfE"]
        return self._children.run(
            [*command, "-c", os.devnull, f"--rootdir={self.folder}", *arguments],
            cwd=self.folder,
            env=outer | inner | environment,
        )
