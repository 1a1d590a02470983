# SPDX-License-Identifier: Apache-2.0
"""A real browser, driven by Playwright, for pages that people open."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from audit import records
from support.site.screens import DESK, Screen


@contextlib.contextmanager
def started() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    options = ["--disable-gpu", *([] if os.geteuid() else ["--no-sandbox"])]  # which root lacks
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        with contextlib.closing(browser):
            records.note("browser", "chromium", browser.version)
            yield browser


@contextlib.contextmanager
def page_of(browser: Any, path: Path) -> Iterator[Any]:
    """A file in a page of its own; what it prints, throws or fetches elsewhere is an error."""
    with contextlib.closing(Screen(browser, DESK, "light")) as screen:
        screen.show(path.as_uri())
        yield screen.page
        assert screen.wrong == [], path.name
