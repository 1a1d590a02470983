# SPDX-License-Identifier: Apache-2.0
"""Archives of sources from PyPI with suites that wheels lack: `python -m outside.archive` fetches
them into build/outside, where they are read."""

import hashlib
import sys
import tarfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.places import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

EXPECTED = Path(__file__).with_name("expected.toml")
FOLDER = Path("build/outside")


def entries() -> dict[str, dict[str, Any]]:
    return tomllib.loads(EXPECTED.read_text())


def is_archive(entry: Mapping[str, Any]) -> bool:
    return entry["source"].startswith("https://")


def name(entry: Mapping[str, Any]) -> str:
    return str(FOLDER / entry["source"].rpartition("/")[2])


def release(entry: Mapping[str, Any]) -> str:
    """Return the release of a suite in pip's form, which is also in the name of an archive."""
    if not is_archive(entry):
        return entry["needs"][0]
    return "==".join(Path(name(entry)).name.removesuffix(".tar.gz").rsplit("-", 1))


def read(entry: Mapping[str, Any], *members: str) -> dict[str, str]:
    path = ROOT / name(entry)
    wanted = {f"{path.name.removesuffix('.tar.gz')}/{member}": member for member in members}
    found = {}
    with tarfile.open(path) as opened:
        for info in opened:  # ends early, as unpacking the whole archive takes a while
            if info.name in wanted:
                found[wanted[info.name]] = opened.extractfile(info).read().decode()
            if len(found) == len(wanted):
                return found
    raise ValueError(f"{path} has no {', '.join(sorted(set(members) - set(found)))}")


def fetch(entry: Mapping[str, Any]) -> None:
    with urllib.request.urlopen(entry["source"], timeout=60) as answer:
        content = answer.read()
    found = hashlib.sha256(content).hexdigest()
    if found != entry["sha256"]:
        raise OSError(f"the hash is {found}, not that of {EXPECTED.name}")
    path = ROOT / name(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The archive appears complete or not at all, even if this is interrupted.
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def main() -> int:
    status = 0
    for entry in entries().values():
        if is_archive(entry) and not (ROOT / name(entry)).is_file():
            try:
                fetch(entry)
            except OSError as error:
                print(f"Not here: {name(entry)}: {error}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
