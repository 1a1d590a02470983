# SPDX-License-Identifier: Apache-2.0
"""The table of a run, and what is known of the mutants that survive."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mutate.campaign import Entry, Key

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

COLUMNS = ("mutants", "killed", "survived", "equivalent")


class Verdicts:
    """Mutants that are equivalent to the source, each with the reason."""

    def __init__(self, path: Path) -> None:
        self.why: dict[Key, str] = {}
        if path.exists():
            for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", ()):
                names = ("path", "function", "line", "original", "mutated")
                path_, function, line, original, mutated = (entry[name] for name in names)
                key = (path_, function, line, original, mutated, entry.get("nth", 1))
                self.why[key] = entry["why"]


def _row(entries: Iterable[Entry], verdicts: Verdicts) -> Counter[str]:
    row: Counter[str] = Counter()
    for entry in entries:
        row["mutants"] += 1
        if entry.outcome != "survived":
            row["killed"] += 1
        elif entry.key in verdicts.why:
            row["equivalent"] += 1
        else:
            row["survived"] += 1
    return row


def score(row: Counter[str]) -> float:
    """The killed, in percent of those that are not equivalent."""
    counted = row["mutants"] - row["equivalent"]
    return 100.0 * row["killed"] / counted if counted else 100.0


def print_report(entries: list[Entry], verdicts: Verdicts, bar: float) -> bool:
    """Whether the score is high enough and no verdict is wrong."""
    groups = sorted({entry.path for entry in entries})
    rows = [(path, _row((e for e in entries if e.path == path), verdicts)) for path in groups]
    for name, suffix in (("C++", ".cc"), ("Python", ".py")):
        chosen = [entry for entry in entries if entry.path.endswith(suffix)]
        if chosen:
            rows.append((name, _row(chosen, verdicts)))
    rows.append(("all", _row(entries, verdicts)))
    width = max(len(name) for name, _ in rows)
    print(f"\n{'':{width}}  {'  '.join(f'{name:>10}' for name in COLUMNS)}     score")
    for name, row in rows:
        print(
            f"{name:{width}}  {'  '.join(f'{row[column]:10}' for column in COLUMNS)}"
            f"  {score(row):6.1f} %"
        )
    wrong = [e for e in entries if e.key in verdicts.why and e.outcome != "survived"]
    for entry in wrong:
        print(f"not equivalent: {entry.path}: {entry.line}: {entry.mutated}: {entry.by} fails")
    for entry in entries:
        if entry.outcome == "survived" and entry.key not in verdicts.why:
            print(f"\n{entry.path}: {entry.function}: {entry.line}")
            print(f"    {entry.original}  ->  {entry.mutated}  ({entry.nth})  {entry.by}")
    sys.stdout.flush()
    return not wrong and score(rows[-1][1]) >= bar
