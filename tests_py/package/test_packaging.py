# SPDX-License-Identifier: Apache-2.0
"""The sdist has what builds it and nothing else, and the compiler of wheels knows its options.

make asks for no root: one line installs what the system lacks, and `make system` runs it. The
tests read image, conda recipe and citation as the tools that take them would.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile

import build_sdist
import jinja2
import pytest
import yaml
from requirements import tomllib

import cpattn
from support.command_line import invoke
from support.places import ROOT


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    pytest.importorskip("scikit_build_core")
    return build_sdist.build(tmp_path_factory.mktemp("sdist"))


def test_its_files(sdist, children):
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    assert build_sdist.wrong_names(names) == []
    there = {name.partition("/")[2] for name in names}
    listed = children.run(["git", "ls-files", "cpp", "python", "cmake"], cwd=ROOT)
    assert set(listed.stdout.splitlines()) <= there
    assert {"cpp/CMakeLists.txt", "python/cpattn/py.typed", "cmake/zig/c++"} <= there


def test_names_that_do_not_belong_there_or_are_missing():
    top = [f"cpattn-1.0/{entry}" for entry in build_sdist.TOP]
    wrong = [
        "build/release/build.ninja", "docs/support.md", "python/cpattn/_core.cpython-311.so",
        "python/cpattn/__pycache__/cli.cpython-311.pyc", "cpp/base/cpu.cc.o", "mkdocs.yml",
    ]  # fmt: skip
    wrong = [f"cpattn-1.0/{name}" for name in wrong]
    assert build_sdist.wrong_names([*top, *wrong]) == wrong
    assert build_sdist.wrong_names([x for x in top if "LICENSE" not in x]) == ["LICENSE"]


@pytest.mark.slow
@pytest.mark.parametrize("isas", ["all", "here", "best"])
def test_cmake_finds_all_sources_in_it(sdist, tmp_path, isas):
    """No checkout surrounds the sdist. CMake refuses a list that names a missing file. It asks the
    machine for its sets where `make test` (here) and `make demo` (best) want these alone."""
    source = build_sdist.unpack(sdist, tmp_path)
    done = subprocess.run(
        [
            "cmake", "-S", source, "-B", tmp_path / "build", "-G", "Ninja",
            "-DCPATTN_TESTS=OFF", f"-DCPATTN_ISAS={isas}", f"-DPython_EXECUTABLE={sys.executable}",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Build files have been written" in done.stdout
    if isas != "all":
        names = re.search(r"cpattn: kernels for (.*) alone", done.stdout)
        assert names
        supported = [isa.replace("-", "") for isa in cpattn.supported_isas()]
        assert names[1].split(", ") == (
            supported if isas == "here" else supported[:1] + supported[-1:]
        )


WRAPPER = ROOT / "cmake" / "zig" / "c++"


def translate(tmp_path, *options: str) -> list[str]:
    zig = tmp_path / "zig"
    zig.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    zig.chmod(0o755)
    done = subprocess.run(
        [WRAPPER, *options], env={"ZIG": str(zig)}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("option", "translated"),
    [
        ("-march=x86-64-v2", "-march=x86_64_v2"),
        ("-march=armv8-a", "-mcpu=generic"),
        ("-march=armv8.2-a+bf16+dotprod", "-mcpu=generic+v8_2a+bf16+dotprod"),
    ],
)
def test_names_of_processors(tmp_path, option, translated):
    others = ["-O3", "-mavx512bf16", '-DTEXT="a b"', "a file.cc", ""]
    assert translate(tmp_path, *others, option, "-c") == ["c++", *others, translated, "-c"]
    assert translate(tmp_path) == ["c++"]


def test_every_processor_of_the_build_is_translated(tmp_path):
    """CMake would leave out the kernels, or end, if zig refused a name."""
    text = (ROOT / "cpp" / "CMakeLists.txt").read_text(encoding="utf-8")
    names = set(re.findall(r"-march=[\w.+-]+", text))
    assert len(names) >= 5
    for name in names:
        (_, translated) = translate(tmp_path, name)
        assert "-" not in translated.partition("=")[2]


INSTALL = "apt-get install -y --no-install-recommends"


@pytest.fixture
def system_packages(tmp_path, children):
    """Return a function that runs the script; apt-get and sudo only note that they were called."""
    log = tmp_path / "calls"

    def run(*arguments, user):
        tools = {
            "id": f"echo {user}",
            "dpkg": '[ "$2" = there ]',
            "apt-get": f'echo apt-get "$@" >>{log}',
            "sudo": f'echo sudo >>{log}; exec "$@"',
        }
        for name, script in tools.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        log.write_text("")
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["scripts/system_packages.sh", *arguments]
        done = children.run(command, cwd=ROOT, env=environment)
        return done, log.read_text().splitlines()

    return run


def test_a_user_is_told_and_nothing_is_installed(system_packages):
    done, calls = system_packages("demo", sys.executable, "there", "missing", user=1000)
    assert done.returncode == 1
    assert "`make system` installs them" in done.stderr
    assert f"  sudo {INSTALL} missing\n" in done.stderr
    assert not calls
    done, calls = system_packages("demo", sys.executable, "there", user=1000)
    assert (done.returncode, done.stdout, done.stderr, calls) == (0, "", "", [])


@pytest.mark.parametrize(("option", "user"), [(["--install"], 1000), ([], 0)])
def test_sudo_or_root_installs_and_says_so(system_packages, option, user):
    done, calls = system_packages(*option, "demo", sys.executable, "missing", user=user)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Installing as root: {INSTALL} missing\n"
    if user:
        update, install = "apt-get update -qq", f"{INSTALL} -qq missing"
        assert calls == ["sudo", update, "sudo", install]
    else:
        assert calls == ["apt-get update -qq", f"{INSTALL} -qq missing"]


PACKAGING = ROOT / "scripts" / "packaging"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions():
    """Return lines of the Dockerfile, continued ones joined, as an instruction and the rest."""
    text = (PACKAGING / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_stages_of_the_image():
    stages, copied = [], []
    for name, rest in instructions():
        assert name in {"FROM", "RUN", "COPY", "USER", "WORKDIR", "CMD"}
        if name == "FROM":
            stages.append(rest.partition(" AS ")[2])
        elif name == "COPY" and rest.startswith("--from="):
            copied.append(rest.split()[0].removeprefix("--from="))
            assert copied[-1] in stages[:-1]
    assert (stages, copied) == (["build", ""], ["build"])


def test_what_the_image_installs():
    runs = [rest for name, rest in instructions() if name == "RUN"]
    (wheels,) = (rest for rest in runs if rest.startswith("pip wheel"))
    sources = [word for word in shlex.split(wheels) if word.startswith("/source")]
    for source in sources:
        assert (ROOT / source.removeprefix("/source").lstrip("/") / "pyproject.toml").exists()
    assert len(sources) == 3
    assert any(f"torch=={version}" in rest for rest in runs for version in torch_of_make())


def torch_of_make():
    return re.findall(r"^TORCH \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_command_of_the_image():
    ((_, command),) = (x for x in instructions() if x[0] == "CMD")
    shell, option, script = json.loads(command)
    assert (shell, option) == ("sh", "-c")
    for call in script.split(" && "):
        program, subcommand, *options = call.split()
        assert program == "cpattn"
        shown = invoke(subcommand, "--help")
        assert shown.exit_code == 0
        assert all(name in shown.stdout for name in options)


def test_the_conda_recipe():
    folder = PACKAGING / "conda"

    def load_file_data(name, *, from_recipe_dir):
        assert from_recipe_dir
        return tomllib.loads((folder / name).read_text())

    names = {"load_file_data": load_file_data, "PYTHON": "python"}
    names |= {"compiler": "{}_compiler".format, "stdlib": "{}_stdlib".format}
    template = jinja2.Environment(autoescape=True).from_string((folder / "meta.yaml").read_text())
    recipe = yaml.safe_load(template.render(**names))
    project = PYPROJECT["project"]
    assert recipe["package"] == {"name": "cpattn", "version": project["version"]}
    assert (folder / recipe["source"]["path"]).resolve() == ROOT
    # The recipe needs what PyPI's package needs, except that Eigen has another name.
    host = {line.replace(" ", "") for line in recipe["requirements"]["host"]}
    wanted = {x.replace("cmeel-eigen", "eigen") for x in PYPROJECT["build-system"]["requires"]}
    assert wanted <= host
    run = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    assert run == {"python", *project["dependencies"]}
    for file in (*recipe["test"]["source_files"], recipe["about"]["license_file"]):
        assert (ROOT / file).is_file()
    assert recipe["test"]["commands"][0].split()[1] in recipe["test"]["source_files"]


def test_the_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # its schema needs them
    assert citation["version"] == PYPROJECT["project"]["version"]
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["authors"] == PYPROJECT["project"]["authors"]
