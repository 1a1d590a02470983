# SPDX-License-Identifier: Apache-2.0
"""A C++ test program and a Python package that have all mutants in them.

Only the files with mutants are compiled; all else is taken from the release build.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutate.control import CAPACITY, MODULE
from mutate.instrument import SWITCH, instrumented
from mutate.operators import Mutant, mutants

HERE = Path(__file__).parent
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_ERROR = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+):(?P<column>\d+): (?:fatal )?error: ", re.M)
# Assertions of the library see indices that the builds with sanitizers would.
_FLAGS = (
    *("-O1", "-D_GLIBCXX_ASSERTIONS", "-w", "-Wno-narrowing"),
    *("-fmax-errors=0", "-fdiagnostics-color=never"),
)


class BuildError(RuntimeError):
    """What the compiler said, where no mutant is to blame."""


@dataclass(frozen=True)
class Build:
    root: Path
    """Of the project."""
    release: Path
    folder: Path
    mutants: dict[int, Mutant]
    """By number, from 1; those that compile."""

    @property
    def program(self) -> Path:
        return self.folder / "cpattn_tests"

    @property
    def python(self) -> Path:
        return self.folder / "python"

    def digest(self) -> str:
        """Of all that the tests run, themselves left out."""
        sha = hashlib.sha256()
        for path in sorted([*self.root.glob("cpp/**/*.*"), *self.root.glob("python/**/*.py")]):
            sha.update(path.read_bytes())
        sha.update(repr(sorted(self.mutants)).encode())
        return sha.hexdigest()


def digest_of(paths: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for path in paths:
        sha.update(path.read_bytes())
    return sha.hexdigest()


def build(root: Path, release: Path, folder: Path, sources: list[Path], jobs: int) -> Build:
    """Whatever has not changed since it was last built stays."""
    folder.mkdir(parents=True, exist_ok=True)
    numbered: list[tuple[Path, dict[int, Mutant]]] = []
    count = 1
    for path in sources:
        found = mutants(path, root)
        numbered.append((path, {count + i: mutant for i, mutant in enumerate(found)}))
        count += len(found)
    if count > CAPACITY:
        raise BuildError(f"at most {CAPACITY - 1} mutants fit, there are {count - 1}")
    cpp = [entry for entry in numbered if entry[0].suffix == ".cc" and entry[1]]
    commands = _compile_commands(root, release) if cpp else {}
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda entry: compiled(commands, folder / "objects", *entry), cpp))
    alive: dict[int, Mutant] = {}
    for _, kept in results:
        alive |= kept
    _package(root, release, folder / "python", [e for e in numbered if e[0].suffix == ".py"], alive)
    if cpp:
        _link_all(release, folder, [str(path) for path, _ in results])
    return Build(root, release, folder, alive)


def _link_all(release: Path, folder: Path, objects: list[str]) -> None:
    runtime = folder / "objects" / "mutants.o"
    flags = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-O1")
    _run(["c++", *flags, "-c", str(HERE / "mutants.cc"), "-o", str(runtime)], folder)
    module = next(release.glob("python/cpattn/_core.*.so")).name
    for target, output in (
        ("cpattn_tests", folder / "cpattn_tests"),
        ("_core", folder / "python" / "cpattn" / module),
    ):
        _link(release, target, [*objects, str(runtime)], output)


def _run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr}")


def _compile_commands(root: Path, release: Path) -> dict[Path, dict[str, str]]:
    """The command of each source: its own, or that of the unit which includes it."""
    commands = {}
    for entry in json.loads((release / "compile_commands.json").read_text()):
        path = Path(entry["file"])
        parts = _INCLUDED.findall(path.read_text()) if path.parent.name == "Unity" else []
        for source in [root / part for part in parts] or [path]:
            commands[source.resolve()] = entry
    return commands


def compiled(
    commands: dict[Path, dict[str, str]], folder: Path, path: Path, found: dict[int, Mutant]
) -> tuple[Path, dict[int, Mutant]]:
    """An object file, and the mutants in it: without those that do not compile."""
    folder.mkdir(exist_ok=True)
    entry = commands[path.resolve()]
    text_path, output = folder / path.name, folder / f"{path.stem}.o"
    command = [part for part in shlex.split(entry["command"]) if part != "-Werror"]
    command[command.index("-o") + 1] = str(output)
    command[command.index("-c") + 1] = str(text_path)
    command += [f"-I{HERE}", *_FLAGS]
    source = path.read_bytes()
    built = folder / f"{path.stem}.json"
    own = (HERE / name for name in ("build.py", "instrument.py", "mutants.h", "operators.py"))
    top = next((up for up in path.parents if up.name == "cpp"), path.parents[1])
    headers = top.glob("**/*.h")
    stamp = f"{digest_of([path, *own, *sorted(headers)])} {min(found)}"
    if built.exists() and (last := json.loads(built.read_text()))["stamp"] == stamp:
        return output, {number: found[number] for number in last["numbers"]}
    kept = dict(found)
    while True:
        text = instrumented(source, kept)
        text_path.write_text(text)
        done = subprocess.run(
            command, cwd=entry["directory"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            break
        blamed = set(_blamed(text, text_path.name, done.stderr)) & kept.keys()
        if not blamed:
            raise BuildError(f"{path}:\n{done.stderr[:4000]}")
        for number in blamed:
            del kept[number]
    built.write_text(json.dumps({"stamp": stamp, "numbers": sorted(kept)}))
    return output, kept


def _blamed(text: str, name: str, errors: str) -> Iterator[int]:
    """The mutants whose switches stand right before what the compiler complains about."""
    lines = text.splitlines(keepends=True)[2:]  # after the line that names the header, and #line
    for error in _ERROR.finditer(errors):
        if Path(error["file"]).name != name:
            continue
        row, column = int(error["line"]) - 1, int(error["column"]) - 1
        before = "".join(lines[:row]) + lines[row].encode()[:column].decode(errors="ignore")
        switches = SWITCH.findall(before)
        # An error at "?" or at an operator may stand before the text that causes it.
        switches = switches[-1:] or SWITCH.findall(lines[row])[:1]
        yield from map(int, switches)


def _link(release: Path, target: str, objects: list[str], output: Path) -> None:
    """As the release build does, with our objects before the library that has the others. A unit of
    it may have a second definition of what ours define: the first counts."""
    said = subprocess.run(
        ["ninja", "-t", "commands", target],
        cwd=release,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    command = shlex.split(said.partition("&&")[2].rpartition("&&")[0])
    library = next(i for i, part in enumerate(command) if part.endswith("libcpattn_core.a"))
    command[library:library] = [*objects, "-Wl,--allow-multiple-definition"]
    command[command.index("-o") + 1] = str(output)
    output.unlink(missing_ok=True)  # it may be a link into the release build
    _run(command, release)


def _package(
    root: Path,
    release: Path,
    folder: Path,
    numbered: list[tuple[Path, dict[int, Mutant]]],
    alive: dict[int, Mutant],
) -> None:
    """A copy of the package, with the extension of the release build for as long as there is no
    other; mutants of Python sources are added to `alive`."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(root / "python" / "cpattn", folder / "cpattn", ignore=ignored)
    for module in release.glob("python/cpattn/_core.*.so"):
        (folder / "cpattn" / module.name).symlink_to(module.resolve())
    (folder / "cpattn_mutants.py").write_text(MODULE)
    for path, found in numbered:
        if found:
            text = instrumented(path.read_bytes(), found)
            target = folder / path.relative_to(root / "python")
            compile(text, str(target), "exec")
            target.write_text(text)
            alive |= found
