# SPDX-License-Identifier: Apache-2.0
"""Seconds of each step of .ci/run, which writes their begins into the folder of --records, beside
stored seconds for this class of machine; `python -m audit.steps FOLDER` prints an entry."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from audit import machine, skips

LIST = Path(__file__).with_name("step_seconds.toml")
SLOWER = 1.3  # factor of the stored seconds that is worth a warning
_NOISE = 10.0  # so many more seconds are not


@dataclass(frozen=True)
class Steps:
    """One run of .ci/run: `seconds` by step, in order, and the key of its stored seconds."""

    key: str
    seconds: dict[str, float]

    def lines(self, stored: dict[str, float]) -> list[str]:
        """Return a line for each step and one for all, with warnings of slower steps."""
        rows = [("step", "seconds", "stored", "")]
        for name, seconds in (self.seconds | {"all": sum(self.seconds.values())}).items():
            before = stored.get(name) if name != "all" else sum(stored.values())
            is_slow = before and seconds > max(SLOWER * before, before + _NOISE)
            warning = f"  {seconds / before:.1f} x what is stored" if before and is_slow else ""
            rows.append((name, f"{seconds:.0f}", f"{before:.0f}" if before else "-", warning))
        width = max(len(row[0]) for row in rows)
        return [f"{name:{width}}  {now:>7}  {before:>6}{say}" for name, now, before, say in rows]


def read(folder: Path, end: float | None = None) -> Steps | None:
    for path in sorted(folder.glob("steps-*.tsv")):
        rows = [line.split("\t") for line in path.read_text().splitlines()]
        begins = [float(begin) for begin, _ in rows] + [time.time() if end is None else end]
        names = [name for _, name in rows]
        seconds = {
            name: after - begin
            for name, begin, after in zip(names, begins, begins[1:], strict=False)
        }
        return Steps(f"{machine.class_of_machine()}, {path.stem.partition('-')[2]}", seconds)
    return None


def stored(key: str) -> dict[str, float]:
    return skips.tomllib.loads(LIST.read_text()).get(key, {})


def main(folder: str) -> None:
    steps = read(Path(folder))
    if steps is None:
        sys.exit(f"audit.steps: {folder} has no steps-cold.tsv and no steps-warm.tsv")
    print(f'["{steps.key}"]')
    for name, seconds in steps.seconds.items():
        print(f'"{name}" = {seconds:.0f}')


if __name__ == "__main__":
    main(sys.argv[1])
