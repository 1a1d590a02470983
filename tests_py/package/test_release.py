# SPDX-License-Identifier: Apache-2.0
"""scripts/check_release.py accepts a release that is ready, and names each mistake."""

import subprocess
import zipfile
from datetime import date, timedelta

import check_release
import pytest

TODAY = date.today().isoformat()
LOG = (
    f"# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - {TODAY}\n\n- New.\n\n## [1.1.0] - 2020-01-01\n"
)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "cpattn"\nversion = "1.2.0"\n')
    for pattern, file in check_release.PLACES:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        line = pattern.strip("^").replace("\\", "").replace("(.+)", "1.2.0")
        line = line.replace("(S+)", "1.2.0").replace('([^"]+)', "1.2.0")
        path.write_text((path.read_text() if path.exists() else "") + line + "\n")
    (tmp_path / "CHANGELOG.md").write_text(LOG)
    return tmp_path


def git(project, *command: str) -> None:
    name = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "tag.gpgSign=false"]
    subprocess.run(["git", *name, *command], cwd=project, capture_output=True, check=True)


@pytest.fixture
def repository(project):
    git(project, "init")
    git(project, "add", ".")
    git(project, "-c", "commit.gpgSign=false", "commit", "-m", "All")
    return project


def make_wheel(file, version="1.2.0", modules=1, typed=True):
    with zipfile.ZipFile(file, "w") as archive:
        package = file.name.partition("-")[0]
        metadata = f"Metadata-Version: 2.4\nName: {package}\nVersion: {version}\n\nText.\n"
        archive.writestr(f"{package}-1.2.0.dist-info/METADATA", metadata)
        for number in range(modules if package == "cpattn" else 0):
            archive.writestr(f"cpattn/_core.cpython-{number}.so", "")
        if typed:
            archive.writestr(f"{package}/py.typed", "")


@pytest.fixture
def dist(tmp_path):
    folder = tmp_path / "dist"
    folder.mkdir()
    for name in check_release.expected_names("1.2.0"):
        if name.endswith(".whl"):
            make_wheel(folder / name)
        else:
            (folder / name).write_bytes(b"")
    return folder


TOMORROW = (date.today() + timedelta(1)).isoformat()


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("CMakeLists.txt", "1.2.0", "1.1.9", "CMakeLists.txt has version 1.1.9, pyproject.toml 1"),
        (
            check_release._LAB,
            "cpattn-proof==1.2.0",
            "cpattn-proof==1.1.9",
            f"{check_release._LAB} has v",
        ),
        ("CHANGELOG.md", "[1.2.0]", "[1.1.9]", "the newest release in CHANGELOG.md is 1.1.9, "),
        ("CHANGELOG.md", "## [Unreleased]\n", "", "CHANGELOG.md does not begin with a section"),
        ("CHANGELOG.md", TODAY, "soon", "CHANGELOG.md dates 1.2.0 to 'soon', which is no day"),
        ("CHANGELOG.md", f" - {TODAY}", "", "CHANGELOG.md dates 1.2.0 to '', which is no day"),
        ("CHANGELOG.md", TODAY, TOMORROW, f"CHANGELOG.md dates 1.2.0 to {TOMORROW}, which"),
        ("CHANGELOG.md", "ed]\n", "ed]\n\n- More.\n", "CHANGELOG.md has changes that are not rel"),
    ],
)
def test_wrong_versions(project, file, old, new, complaint):
    text = (project / file).read_text()
    assert old in text
    (project / file).write_text(text.replace(old, new))
    (said,) = check_release.wrong_versions(project)
    assert said.startswith(complaint)


def test_trees_that_are_ready_and_wrong_ones(repository):
    assert list(check_release.wrong_versions(repository)) == []
    assert list(check_release.wrong_tree(repository, tagged=False)) == []
    (said,) = check_release.wrong_tree(repository, tagged=True)
    assert said == "v1.2.0 is not a tag of this commit: git tag -a v1.2.0"
    git(repository, "tag", "v1.2.0")
    assert list(check_release.wrong_tree(repository, tagged=True)) == []
    (repository / "new").write_text("")
    (said,) = check_release.wrong_tree(repository, tagged=True)
    assert said == "the tree has changes that are not committed: ?? new"


def test_files_that_are_missing_or_too_many(dist, monkeypatch):
    assert len(check_release.expected_names("1.2.0")) == 10
    assert list(check_release.wrong_files(dist, "1.2.0")) == []
    with monkeypatch.context() as patch:
        patch.setattr(check_release, "LARGEST_MB", 0)
        complaints = list(check_release.wrong_files(dist, "1.2.0"))
    assert len(complaints) == 9  # the empty sdist is not too large
    assert all("more than 0" in line for line in complaints)
    gone, more = sorted(check_release.expected_names("1.2.0"))[0], "cpattn-1.1.0.tar.gz"
    (dist / gone).unlink()
    (dist / more).write_bytes(b"")
    assert list(check_release.wrong_files(dist, "1.2.0")) == [
        f"{dist} lacks {gone}",
        f"{dist} has {more}, which is no part of 1.2.0",
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"version": "1.1.0"}, "has another version in its metadata"),
        ({"modules": 0}, "has 0 compiled modules instead of 1"),
        ({"modules": 2}, "has 2 compiled modules instead of 1"),
        ({"typed": False}, "has no cpattn/py.typed"),
    ],
)
def test_wrong_wheels(dist, content, complaint):
    wheel = sorted(dist.glob("*.whl"))[0]
    make_wheel(wheel, **content)
    assert list(check_release.wrong_files(dist, "1.2.0")) == [f"{wheel.name} {complaint}"]


@pytest.mark.parametrize(
    ("program", "num_complaints"),
    [
        ('echo "tag: \\"manylinux_2_17_x\\", \\"musllinux_1_2_x\\""', 0),
        ('echo "tag: \\"manylinux_2_17_x86_64\\""', 2),  # auditwheel complains of the musl wheels
        ('echo "tag: \\"manylinux_2_34_x86_64\\""', 7),  # every wheel has a complaint
        ("echo wrong; exit 1", 8),
    ],
)
def test_what_the_tools_say(monkeypatch, tmp_path, dist, program, num_complaints):
    tools = tmp_path / "tools"
    monkeypatch.setattr(check_release, "TOOLS", tools)
    assert list(check_release.wrong_to_tools(dist)) == [f"{tools} is not there: make wheel"]
    python = tools / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    assert len(list(check_release.wrong_to_tools(dist))) == num_complaints
