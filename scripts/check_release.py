# SPDX-License-Identifier: Apache-2.0
"""Whether a release is ready: `python scripts/check_release.py`, with `--tag` once it is tagged.

Compares the version in all places, the change log, the tag and the tree, and looks at what lies in
dist/: one wheel for each Python and processor, also for musl, and an sdist. Prints what is wrong
and exits with 1, or says what is ready. docs/releasing.md has the whole procedure.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from build_wheels import GLIBC, INSTRUCTION_SETS, MUSL, MUSL_PYTHON, PYTHONS, ROOT, TOOLS

#: Packages of this one's kind have some megabytes; what PyPI takes without asking ends at 100.
LARGEST_MB = 20


_LAB = "python/distributions/cpattn-lab/pyproject.toml"
#: All places that have the version, beside pyproject.toml.
PLACES = (
    (r"^project\(cpattn VERSION (\S+)", "CMakeLists.txt"),
    (r'^#define CPATTN_VERSION "(.+)"', "cpp/c/include/cpattn.h"),
    (r'^version = "(.+)"', "python/distributions/cpattn-proof/pyproject.toml"),
    (r'^version = "(.+)"', _LAB),
    (r'"cpattn\[torch\]==([^"]+)"', _LAB),
    (r'"cpattn-proof==([^"]+)"', _LAB),
    (r'^VERSION = "(.+)"', "python/cpattn_terminal/distributions.py"),
    (r"^version: (.+)", "CITATION.cff"),
)


def first(pattern: str, file: Path) -> str | None:
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def version_of(root: Path) -> str:
    found = first(r'^version = "(.+)"', root / "pyproject.toml")
    return found or "nothing"


def wrong_versions(root: Path) -> Iterator[str]:
    """All places have that of pyproject.toml, the change log with a day that has been."""
    version = version_of(root)
    for pattern, file in PLACES:
        other = first(pattern, root / file)
        if other != version:
            yield f"{file} has version {other}, pyproject.toml {version}"
    log = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", log, re.MULTILINE)
    if not headings or headings[0] != ("Unreleased", ""):
        yield "CHANGELOG.md does not begin with a section [Unreleased]"
        return
    released, day = headings[1] if headings[1:] else ("none", "")
    if released != version:
        yield f"the newest release in CHANGELOG.md is {released}, pyproject.toml has {version}"
        return
    try:
        if date.fromisoformat(day) > date.today():
            yield f"CHANGELOG.md dates {version} to {day}, which is still to come"
    except ValueError:
        yield f"CHANGELOG.md dates {version} to {day!r}, which is no day like 2026-11-22"
    pending = log.partition("## [Unreleased]")[2].partition("\n## [")[0].strip()
    if pending:
        yield f"CHANGELOG.md has changes that are not released: {pending.splitlines()[0]}"


def wrong_tree(root: Path, tagged: bool) -> Iterator[str]:
    """Nothing is left to commit, and the tag names this commit."""

    def git(*command: str) -> list[str]:
        done = subprocess.run(
            ["git", *command], cwd=root, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    changed = git("status", "--porcelain")
    if changed:
        yield f"the tree has changes that are not committed: {', '.join(changed[:5])}"
    tag = f"v{version_of(root)}"
    if tagged and tag not in git("tag", "--points-at", "HEAD"):
        yield f"{tag} is not a tag of this commit: git tag -a {tag}"


def expected_names(version: str) -> set[str]:
    """What dist/ has for a release."""
    platforms = {python: ["x86_64"] for python in PYTHONS}
    platforms["3.11"] = ["x86_64", "aarch64"]
    glibc = GLIBC.replace(".", "_")
    names = {
        f"cpattn-{version}-cp{tag}-cp{tag}-manylinux2014_{x}.manylinux_{glibc}_{x}.whl"
        for python, processors in platforms.items()
        for tag in [python.replace(".", "")]
        for x in processors
    }
    tag, musl = MUSL_PYTHON.replace(".", ""), MUSL.replace(".", "_")
    names |= {
        f"cpattn-{version}-cp{tag}-cp{tag}-musllinux_{musl}_{x}.whl" for x in INSTRUCTION_SETS
    }
    pure = {f"{name}-{version}-py3-none-any.whl" for name in ("cpattn_lab", "cpattn_proof")}
    return names | pure | {f"cpattn-{version}.tar.gz"}


def wrong_files(dist: Path, version: str) -> Iterator[str]:
    """All are there and no others; wheels are not empty, have their version and the types."""
    found, expected = {file.name for file in dist.glob("*")}, expected_names(version)
    for name in sorted(expected - found):
        yield f"{dist} lacks {name}"
    for name in sorted(found - expected):
        yield f"{dist} has {name}, which is no part of {version}"
    for name in sorted(found & expected):
        size = (dist / name).stat().st_size / 2**20
        if size > LARGEST_MB:
            yield f"{name} has {size:.0f} MB, more than {LARGEST_MB}"
        if name.endswith(".whl"):
            yield from wrong_wheel(dist / name, version)


def wrong_wheel(wheel: Path, version: str) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        package = wheel.name.partition("-")[0]
        metadata = archive.read(f"{package}-{version}.dist-info/METADATA").decode()
    if f"\nVersion: {version}\n" not in metadata:
        yield f"{wheel.name} has another version in its metadata"
    if f"{package}/py.typed" not in names:
        yield f"{wheel.name} has no {package}/py.typed"
    modules = [name for name in names if re.fullmatch(r"cpattn/_core\.cpython-.*\.so", name)]
    wanted = int(package == "cpattn")
    if len(modules) != wanted:
        yield f"{wheel.name} has {len(modules)} compiled modules instead of {wanted}"


def wrong_to_tools(dist: Path) -> Iterator[str]:
    """What auditwheel and twine say."""
    python = TOOLS / "bin" / "python"
    if not python.exists():
        yield f"{TOOLS} is not there: make wheel"
        return
    commands = [
        ["twine", "check", "--strict", *sorted(map(str, dist.glob("*")))],
        *(["auditwheel", "show", str(wheel)] for wheel in sorted(dist.glob("*linux_*.whl"))),
    ]
    for command in commands:
        done = subprocess.run([python, "-m", *command], capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        tags = (f'"manylinux_{GLIBC}_', f'"musllinux_{MUSL}_')
        tag = tags["musllinux" in command[-1]].replace(".", "_")
        if done.returncode or (command[0] == "auditwheel" and tag not in said):
            yield f"{command[0]}, of {Path(command[-1]).name}: {said.strip()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", action="store_true", help="the commit has its tag")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are")
    given = parser.parse_args()
    version = version_of(ROOT)
    wrong = [
        *wrong_versions(ROOT),
        *wrong_tree(ROOT, given.tag),
        *wrong_files(given.dist, version),
        *wrong_to_tools(given.dist),
    ]
    for line in wrong:
        print(f"check_release.py: {line}", file=sys.stderr)
    if wrong:
        sys.exit(1)
    print(f"{version} is ready: {len(expected_names(version))} files in {given.dist}")


if __name__ == "__main__":
    main()
