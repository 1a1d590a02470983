# SPDX-License-Identifier: Apache-2.0
"""Builds the sdist into dist/, and a wheel out of it, without network and git: make sdist.

The packages that build it are those of this interpreter's environment. With --keep the wheel goes
into a folder; else it is thrown away.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: All that is at its top. The rest of a checkout is for working on the library.
TOP = {
    ".gitignore", "CHANGELOG.md", "CMakeLists.txt", "CMakePresets.json", "LICENSE", "PKG-INFO",
    "README.md", "SECURITY.md", "cmake", "cpp", "pyproject.toml", "python", "tests_cpp",
}  # fmt: skip
#: What a build leaves behind.
OUTPUTS = {".a", ".bin", ".html", ".log", ".o", ".pyc", ".so", ".whl"}


def build(dist: Path) -> Path:
    """The sdist, made by the backend alone: it needs no other package."""
    code = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
    dist.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(dist.resolve())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dist / done.stdout.splitlines()[-1]


def wrong_names(names: list[str]) -> list[str]:
    """Those of an sdist that do not belong in it, and of its top those that it lacks."""
    parts = [name.split("/")[1:] for name in names]
    extra = [
        name
        for name, path in zip(names, parts, strict=True)
        if path[0] not in TOP
        or "__pycache__" in path
        or (Path(name).suffix in OUTPUTS and "corpus" not in path)
    ]
    return extra + sorted(TOP - {path[0] for path in parts})


def unpack(sdist: Path, folder: Path) -> Path:
    """Its folder, which is in no checkout."""
    with tarfile.open(sdist) as archive:
        wrong = wrong_names([member.name for member in archive.getmembers() if member.isfile()])
        if wrong:
            sys.exit(f"build_sdist.py: {sdist.name} should not have, or lacks, {wrong}")
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def build_wheel(source: Path, out: Path) -> Path:
    """Offline, by the packages of this environment.

    It is linked into the sources, where a checkout has it: compilers then get the same relative
    paths, and ccache knows their files.
    """
    environment = Path(sys.prefix)
    (source / environment.name).symlink_to(environment)
    python = source / environment.name / Path(sys.executable).relative_to(environment)
    command = [python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-index"]
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [*command, "--no-deps", "-w", out.resolve(), "."],
        cwd=source,
        env={**variables, "CCACHE_BASEDIR": str(source), "GIT_DIR": "/nowhere"},
        check=True,
    )
    (wheel,) = out.glob("cpattn-*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where it goes")
    parser.add_argument("--keep", type=Path, help="where the wheel that is made of it goes")
    given = parser.parse_args()
    sdist = build(given.dist)
    print(
        f"{sdist.name}, {sdist.stat().st_size / 2**20:.2f} MB: building a wheel of it", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        source = unpack(sdist, Path(folder))
        wheel = build_wheel(source, Path(folder) / "wheel")
        if given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, given.keep)
    print(f"{wheel.name}: built from it, offline")


if __name__ == "__main__":
    main()
