# SPDX-License-Identifier: Apache-2.0
"""A browser shows the site well; `mkdocs build --strict` refuses broken links and anchors."""

import fcntl
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import chromium
from support.chromium import DESK, TELEPHONE, Screen, served

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# One page of every kind is enough: all pages in both schemes would take minutes, most of them for
# the contrast of coloured code in the reference. Every second page is also tried dark.
KINDS = ("index", "404", "how_to/vllm", "how_to/deployment", "reference/kv", "reference/index")
KINDS += ("figures/attention", "figures/index", "explorer/index", "reference/headers")
KINDS += ("notebooks/compare_strategies", "concepts/strategies", "architecture")
# Each room with public names has its page of the reference.
ROOMS = {
    room: page.stem
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for room in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the site of `make docs` at CPATTN_SITE, or build one for these tests.

    Processes of xdist share it: the first one builds it, and others wait.
    """
    if os.environ.get("CPATTN_SITE"):
        return Path(os.environ["CPATTN_SITE"])
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "sitemap.xml").exists():
            subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
                cwd=ROOT,
                env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
                check=True,
            )
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium.started() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(site):
    with served(site) as address:
        yield address


def pages_of(site):
    return sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))


@pytest.mark.parametrize("room", ROOMS)
def test_the_reference_has_every_public_name(room, site):
    page = site / "reference" / f"{ROOMS[room]}.html"
    places = set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))
    try:
        names = getattr(importlib.import_module(room), "__all__", [])
    except ModuleNotFoundError:  # its engine is missing; the reference reads the source
        names = []
    missing = {name for name in names if f"{room}.{name}" not in places}
    if room == "cpattn":
        missing.remove("reference")  # this package has a page of its own
    assert missing == set()
    assert len(ROOMS) > 25
    assert any(place.startswith(f"{room}") for place in places)


@pytest.fixture
def screen(request, browser):
    screen = Screen(browser, *request.param)
    yield screen
    screen.close()


@pytest.mark.parametrize("screen", [(TELEPHONE, "light")], indirect=True)
def test_every_page_loads_and_fits_a_telephone(site, address, screen):
    found = {
        name: [*screen.show(f"{address}/{name}"), *screen.sideways()] for name in pages_of(site)
    }
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("screen", "kinds"),
    [((DESK, "light"), KINDS), ((DESK, "dark"), KINDS[::2])],
    indirect=["screen"],
    ids=["light", "dark"],
)
def test_everybody_can_read_every_kind_of_page(address, screen, kinds):
    found = {
        name: [*screen.show(f"{address}/{name}.html"), *screen.complaints_of_axe()]
        for name in kinds
    }
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
