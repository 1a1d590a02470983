# SPDX-License-Identifier: Apache-2.0
"""The site, built from docs once and shown by a browser."""

import fcntl
import importlib
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from support import chromium
from support.site.screens import DESK, TELEPHONE, Screen, served

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# A page of every kind: both schemes on all pages would take minutes, most of them for the contrast
# of the thousands of coloured words of code in the reference. Every second one is also tried dark.
KINDS = ("index", "404", "how_to/vllm", "how_to/deployment", "reference/kv", "reference/index")
KINDS += ("figures/attention", "figures/index", "explorer/index", "reference/headers")
KINDS += ("notebooks/compare_strategies", "concepts/strategies", "architecture")
ALONE = ("captures", "distributed", "kv", "npu", "profiling", "reference", "scheduling", "sparse")
ALONE += ("torch_guard", "transfer")
INTEGRATIONS = ("flash_attn", "flashinfer", "mooncake", "nixl", "sglang", "torch_npu")
INTEGRATIONS += ("torch_ops", "transformers", "vllm")
# Rooms with public names, and the pages of the reference that have them.
ROOMS = {
    "cpattn": "cpattn",
    "cpattn_lab.cost_model": "cost_model",
    "cpattn_lab.traffic": "traffic",
    "cpattn_proof": "proof",
    **{f"cpattn.{room}": room for room in ALONE},
    **{f"cpattn.{room}.sglang_0_5_23": room for room in ("sparse", "transfer")},
    **{f"cpattn.integrations.{room}": "integrations" for room in INTEGRATIONS},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the site of `make docs` at CPATTN_SITE, or build one for these tests.

    Processes of xdist share it: the first one builds, others wait.
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


class Links(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links = []
        self.loaded = []
        self.places = {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        of = {name: value or "" for name, value in attrs}
        self.places |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        if "src" in of or (tag == "link" and of.get("rel") != "canonical"):
            self.loaded.append(of.get("src", of.get("href", "")))
        self.loaded += [part.split()[0] for part in of.get("srcset", "").split(",") if part]


def target_of(site, page, path):
    """The file that a link of a page leads to. The page for what is not found has absolute ones."""
    if not path:
        return (site / page).resolve()
    base = site if path.startswith("/") else (site / page).parent
    target = (base / unquote(path).lstrip("/")).resolve()
    return target / "index.html" if target.is_dir() else target


def test_no_link_and_no_anchor_is_broken(site):
    pages = {name: Links(site / name) for name in pages_of(site)}
    assert len(pages) > 35
    broken = []
    for name, page in pages.items():
        broken += [(name, link, "elsewhere") for link in page.loaded if "//" in link]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme in ("https", "http", "mailto", "data"):
                continue
            target = target_of(site, name, parts.path)
            if not target.is_file():
                broken.append((name, link, "no such file"))
            elif parts.fragment and target.suffix == ".html":
                places = pages[str(target.relative_to(site.resolve()))].places
                if unquote(parts.fragment) not in places:
                    broken.append((name, link, "no such place"))
    assert broken == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_reference_has_every_public_name(room, site):
    places = Links(site / "reference" / f"{ROOMS[room]}.html").places
    try:
        names = getattr(importlib.import_module(room), "__all__", [])
    except ModuleNotFoundError:  # of an engine that is not here; the reference reads its source
        names = []
    missing = {name for name in names if f"{room}.{name}" not in places}
    if room == "cpattn":
        missing.remove("reference")  # a package, with a page of its own
    assert missing == set()
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
