# SPDX-License-Identifier: Apache-2.0
"""`cpattn doctor`: the plain run, and every line with its condition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("click")

from cpattn import _core, supported_isas, torch_guard
from cpattn._cli.doctor import environment, machine, report, self_test
from cpattn._cli.doctor.finding import Finding
from support.command_line import CommandLine
from support.entry_points import write_distribution

PLAIN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("CPATTN_", "ONEDNN_", "VLLM_", "SGLANG_", "COLUMNS"))
}
LIMIT = torch_guard.onednn_limit(
    amx_usable=_core.amx_usable(),
    palette_missing=_core.amx_palette_missing(),
    has_avx512_fp16=_core.has_avx512_fp16(),
)
if LIMIT:  # torch would die on this machine, and doctor say so
    PLAIN[torch_guard.VARIABLE] = LIMIT


def doctor(line: CommandLine, **environ: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and findings by name, of a run in a process."""
    result = line.run("doctor", "--json", env={**PLAIN, **environ})
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer["passed"] == (result.returncode == 0)
    return result.returncode, {finding["name"]: finding for finding in answer["findings"]}


def by_name(findings: object) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def fake(folder: Path, name: str, version: str, points: str = "") -> None:
    """A distribution that is installed as far as metadata go."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose distributions are all that is installed."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def test_the_plain_run(command_line: CommandLine) -> None:
    result = command_line.run("doctor", env=PLAIN)
    assert result.returncode == 0, result.stdout
    assert result.stderr == ""
    for name in ("processor", "instructions", "threads", "torch", "vLLM plug-in", "extra cli"):
        assert f"  {name}" in result.stdout or f"- {name}" in result.stdout, name
    for isa in supported_isas():
        assert f"\n  {isa:<16}float32, largest error 0." in result.stdout
    assert "All that cpattn needs works here." in result.stdout
    assert "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_instructions(command_line: CommandLine) -> None:
    code, found = doctor(command_line, CPATTN_ISA="portable")
    assert code == 0
    assert found["instructions"]["text"].startswith("portable, by CPATTN_ISA")
    assert list(found)[-len(supported_isas())] == "portable", "what is in use is tried first"
    code, found = doctor(command_line, CPATTN_ISA="sse9")
    assert code == 1
    assert "CPATTN_ISA: 'sse9' is not an instruction set" in found["instructions"]["text"]
    assert found["instructions"]["state"] == found["attention"]["state"] == "broken"


def test_threads(command_line: CommandLine) -> None:
    cpus = len(os.sched_getaffinity(0))
    code, found = doctor(command_line, CPATTN_NUM_THREADS=str(4 * cpus))
    assert code == 0
    assert found["threads"]["state"] == "warning"
    assert f"a call uses {4 * cpus}, by CPATTN_NUM_THREADS" in found["threads"]["text"]
    assert found["threads"]["hint"] == f"export CPATTN_NUM_THREADS={cpus}"
    code, found = doctor(command_line, CPATTN_NUM_THREADS="many")
    assert code == 1
    assert "got 'many'" in found["threads"]["text"]


def files(root: Path, **contents: str) -> Path:
    """A root folder with files, whose names have __ for a slash."""
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("contents", "cpus"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu__cpu.cfs_quota_us": "-1\n", "cpu__cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu__cpu.cfs_quota_us": "50000\n", "cpu__cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_quota_of_a_container(tmp_path: Path, contents: dict[str, str], cpus: float | None) -> None:
    root = files(tmp_path, **{f"sys__fs__cgroup__{name}": text for name, text in contents.items()})
    assert machine.cgroup_cpus(root) == cpus
    with mock.patch.object(_core, "default_num_threads", return_value=2):
        finding = by_name(machine.findings(root))["CPU quota"]
    if cpus is None:
        assert (finding.text, finding.state) == ("none", "ok")
    else:
        assert finding.text == f"time of {cpus:g} CPUs for 2 threads, which will wait"
        assert (finding.state, finding.hint) == ("warning", "export CPATTN_NUM_THREADS=1")


def test_memory_and_nodes(tmp_path: Path) -> None:
    folder = "sys__kernel__mm__transparent_hugepage__enabled"
    node = "sys__devices__system__node__node"
    root = files(tmp_path, **{folder: "always madvise [never]\n", f"{node}0__cpulist": "0-1"})
    found = by_name(machine.findings(root))
    assert found["huge pages"].text == "never: KV pools have small pages"
    assert found["NUMA"].text == "1 node"
    assert found["/dev/shm"].state == "warning"
    assert "No such file" in found["/dev/shm"].text
    files(root, **{folder: "always [madvise] never\n", f"{node}1__cpulist": "2-3"})
    (root / "dev" / "shm").mkdir(parents=True)
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    with mock.patch.object(os, "statvfs", return_value=small):
        found = by_name(machine.findings(root))
    assert found["huge pages"].text == "madvise: KV pools get them"
    assert found["NUMA"].text.startswith("2 nodes: ")
    assert found["/dev/shm"].text == "only 64 MiB, 64 MiB free"
    assert "--shm-size" in found["/dev/shm"].hint


@pytest.fixture
def half_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "amx_usable", lambda: True)
    monkeypatch.setattr(_core, "amx_palette_missing", lambda: True)
    monkeypatch.setattr(_core, "has_avx512_fp16", lambda: True)


@pytest.mark.usefixtures("half_exposed")
@pytest.mark.parametrize(
    ("given", "state"),
    [
        (None, "broken"),
        ("ALL", "broken"),
        ("DEFAULT", "broken"),
        ("AVX512_CORE_AMX", "broken"),
        ("AVX512_CORE_FP16", "ok"),
        ("avx2", "ok"),
    ],
)
def test_torch_without_its_guard(packages: Path, given: str | None, state: str) -> None:
    fake(packages, "torch", "2.13.0")
    variable = torch_guard.VARIABLE
    found = by_name(environment.findings({} if given is None else {variable: given}))
    assert found["torch guard"].state == state
    if state == "broken":
        assert "would die with SIGILL" in found["torch guard"].text
        assert found["torch guard"].hint.startswith(f"export {variable}=AVX512_CORE_FP16")
    assert by_name(machine.findings())["AMX"].state == "warning"


@pytest.mark.usefixtures("half_exposed")
def test_without_torch_it_needs_no_guard(packages: Path) -> None:
    assert "torch guard" not in by_name(environment.findings({}))


@pytest.mark.parametrize(
    ("distribution", "version", "name", "text", "state"),
    [
        ("vllm", "0.32.0", "vLLM on CPU", "vllm 0.32.0, as tried", "ok"),
        ("vllm", "0.33.1", "vLLM on CPU", "vllm 0.33.1: refused, 0.32.0 was", "warning"),
        ("sglang", "0.5.1", "sglang", "0.5.1: not tried, 0.5.23 was", "warning"),
        ("transformers", "5.23.0", "transformers", "5.23.0, as tried", "ok"),
        ("torch", "2.13.0+cpu", "torch", "2.13.0+cpu, as tried", "ok"),
        ("numpy", "1.25.2", "NumPy", "1.25.2: refused", "warning"),
    ],
)
def test_releases(
    packages: Path, distribution: str, version: str, name: str, text: str, state: str
) -> None:
    fake(packages, distribution, version)
    found = by_name(environment.findings({}))[name]
    assert found.text.startswith(text)
    assert found.state == state


def test_plugins(packages: Path) -> None:
    def lines(**environ: str) -> tuple[Finding, Finding]:
        found = by_name(environment.findings(environ))
        return found["sglang plug-in"], found["vLLM plug-in"]

    assert {finding.state for finding in lines()} == {"note"}
    fake(packages, "vllm", "0.32.0")
    assert lines()[1].state == "warning", "an engine, and a plug-in that it will not find"
    write_distribution(packages)
    fake(packages, "another", "1", "[vllm.general_plugins]\nother = another:register\n")
    sglang, vllm = lines()
    assert sglang.text == "found; there is no sglang to load it"
    assert vllm.text == "found, active in every vLLM that starts, beside other"
    fake(packages, "sglang", "0.5.23")
    parts = lines(CPATTN_SGLANG_PARTS="kv")[0].text
    assert parts == "found, active, its parts kv in every sglang that starts"
    for finding in lines(CPATTN_PLUGINS="0"):
        assert finding.text.startswith("found, off by CPATTN_PLUGINS=0")
    assert lines(VLLM_PLUGINS="other")[1].text.startswith("found, left out by VLLM_PLUGINS=other")
    assert lines(VLLM_PLUGINS="other,cpattn")[1].text.startswith("found, active")
    assert lines(SGLANG_PLUGINS="")[0].text.startswith("found, left out by SGLANG_PLUGINS=")


def test_extras(packages: Path) -> None:
    fake(packages, "click", "8.1")
    found = by_name(environment.findings({}))
    assert found["extra cli"].text.startswith("without torch, rich, matplotlib, jinja2, which ")
    assert found["extra cli"].hint == "pip install '.[cli]'"
    for name in ("torch", "rich", "matplotlib", "jinja2"):
        fake(packages, name, "99")
    assert by_name(environment.findings({}))["extra cli"].text.startswith("complete")


def test_extras_are_those_of_the_project() -> None:
    from support.entry_points import PYPROJECT, tomllib

    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert set(environment._EXTRAS) == set(extras) - {"test", "fuzz", "lint", "docs", "wheels"}
    for extra, (distributions, _) in environment._EXTRAS.items():
        asked = " ".join(extras[extra])
        assert all(name in asked for name in distributions), extra


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import os; os.kill(os.getpid(), 4)", "killed by SIGILL"),
        ("raise SystemExit('no memory')", "no memory"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("""print('{"isa": "portable", "error": NaN}')""", "largest error nan"),
        ("""print('{"isa": "portable", "error": 7.5}')""", "largest error 7.50"),
    ],
)
def test_a_self_test_that_fails(program: str, text: str) -> None:
    (finding,) = self_test.findings([sys.executable, "-c", program])
    assert text in finding.text
    assert finding.state == "broken"
    assert not report.is_well([finding])
    assert "\nx " in report.as_text([finding], 80)
    assert "1 broken: see the lines with x." in report.as_text([finding], 80)


def test_attention_differs_from_its_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test.error_of_attention() <= 1
    wrong = self_test.paged_attention
    monkeypatch.setattr(self_test, "paged_attention", lambda *a, **k: wrong(*a, **k) + 1e-4)
    assert self_test.error_of_attention() > 1


def test_numpy_and_click_are_enough() -> None:
    program = (
        "import sys\n"
        "for name in ('rich', 'torch', 'matplotlib', 'jinja2', 'vllm', 'sglang', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['cpattn', 'doctor']\n"
        "from cpattn._cli.cli import main\n"
        "main()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env=PLAIN, capture_output=True, text=True, check=False
    )
    assert run.stderr == ""
    assert "self-test" in run.stdout


@pytest.mark.parametrize("width", [20, 40, 60, 200])
def test_any_width(width: int) -> None:
    found = [
        Finding("machine", "threads", "many words " * 20, "warning", "export X=1"),
        Finding("machine", "affinity", "CPUs 0-1"),
    ]
    text = report.as_text(found, width)
    assert max(map(len, text.splitlines())) <= width
    assert "-> export X=1" in text
    assert "\x1b[33m" in report.as_text(found, width, colours=True)
