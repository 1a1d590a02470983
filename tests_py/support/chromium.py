# SPDX-License-Identifier: Apache-2.0
"""A real browser, driven by Playwright: checks errors, width and accessibility of pages."""

import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from audit import records

TELEPHONE, DESK = 400, 1280  # pixels
# Impacts of violations that, by axe-core, keep somebody from reading or using a page.
GRAVE = ("serious", "critical")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Screen:
    """A window of some width, light or dark, and the faults in it since they were last asked."""

    def __init__(self, browser: Any, width: int, scheme: str) -> None:
        self._context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(60_000)  # the machine may be busy
        self.wrong: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("requestfailed", self._lost)
        self.page.on("request", self._asked)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"{message.type}: {message.text}")

    def _lost(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # going to the next page aborts requests
            self.wrong.append(f"lost: {request.url}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            self.wrong.append(f"asks another host: {request.url}")

    def show(self, url: str) -> list[str]:
        self.wrong.clear()
        self.page.goto(url, wait_until="load")
        return [*self.wrong]

    def sideways(self) -> list[str]:
        """Return the elements that stick out, if the page as a whole scrolls sideways."""
        return self.page.evaluate(
            """() => {
              const room = document.documentElement.clientWidth;
              if (document.documentElement.scrollWidth <= room) return [];
              const out = [...document.querySelectorAll("body *")].filter(
                x => x.getBoundingClientRect().right > room + 1);
              return ["scrolls sideways", ...out.slice(0, 5).map(x => x.outerHTML.slice(0, 120))];
            }"""
        )

    def complaints_of_axe(self) -> list[str]:
        """Return grave violations of axe-core's rules, with the first elements of each."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page, options={"resultTypes": ["violations"]}).response
        return [
            f"{rule['id']} ({len(rule['nodes'])}): {node['target']} {node['failureSummary']}"
            for rule in found["violations"]
            if rule["impact"] in GRAVE
            for node in rule["nodes"][:3]
        ]

    def close(self) -> None:
        self._context.close()


@contextlib.contextmanager
def started() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here")
    options = ["--disable-gpu", *([] if os.geteuid() else ["--no-sandbox"])]  # root has no sandbox
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=options)
        with contextlib.closing(browser):
            records.note("browser", "chromium", browser.version)
            yield browser


@contextlib.contextmanager
def page_of(browser: Any, path: Path) -> Iterator[Any]:
    """Open a file in a new page; printed text, exceptions and remote requests are errors."""
    with contextlib.closing(Screen(browser, DESK, "light")) as screen:
        screen.show(path.as_uri())
        yield screen.page
        assert screen.wrong == [], path.name
