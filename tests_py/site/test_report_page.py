# SPDX-License-Identifier: Apache-2.0
"""The page that `cpattn replay --html` writes, shown by a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("torch", "jinja2", "matplotlib", "rich"):
    pytest.importorskip(name)

from cpattn.replay.report.html import write_html  # noqa: E402
from support import chromium  # noqa: E402
from support.replay.made_up_reports import make_report, make_sparse_report  # noqa: E402
from support.site.screens import DESK, TELEPHONE, Screen  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium.started() as browser:
        yield browser


@pytest.mark.parametrize("make", [make_report, make_sparse_report])
@pytest.mark.parametrize(("width", "scheme"), [(TELEPHONE, "light"), (DESK, "dark")])
def test_everybody_can_read_it(make, width, scheme, browser, tmp_path: Path):
    page = tmp_path / "report.html"
    write_html(make(), "a title", page)
    screen = Screen(browser, width, scheme)
    wrong = [*screen.show(page.as_uri()), *screen.sideways(), *screen.complaints_of_axe()]
    screen.close()
    assert wrong == []
