# SPDX-License-Identifier: Apache-2.0
"""Runs the fuzzing targets, two at a time, and prints a table of what they did.

Programs of C++ come from build/fuzz, targets of Python from tests_py/fuzz by Atheris. Each starts
from its corpus in the repository and from what earlier runs found, in build/fuzz/corpus. Inputs
that fail are written to build/fuzz/findings, and the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "fuzz"
PYTHONPATH = os.pathsep.join([str(ROOT / "build" / "release" / "python"), str(ROOT / "tests_py")])
STATUS = re.compile(r"^#(\d+)\s.*?cov: (\d+).*?corp: (\d+)/", re.MULTILINE)
EXECUTIONS = re.compile(r"stat::number_of_executed_units: (\d+)")
INTERRUPTED = 72  # libFuzzer's status on SIGINT
LIMITS = ["-rss_limit_mb=2048", "-timeout=10", "-max_len=400", "-print_final_stats=1"]


@dataclass
class Target:
    """A program to fuzz, and what came of it."""

    name: str
    command: list[str]
    corpus: Path  # in the repository
    executions: int = 0
    edges: int = 0
    corpus_size: int = 0
    seconds: float = 0
    status: int = 0
    findings: list[Path] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return BUILD / "logs" / f"{self.name}.log"

    @property
    def grown(self) -> Path:
        """Where new inputs of the corpus go."""
        return BUILD / "corpus" / self.name

    @property
    def failed(self) -> bool:
        return self.status != 0 or bool(self.findings)

    def run(self, seconds: int, seed: int) -> None:
        findings = BUILD / "findings" / self.name
        for folder in (self.log.parent, self.grown, findings):
            folder.mkdir(parents=True, exist_ok=True)
        known = set(findings.iterdir())
        limits = [*LIMITS, f"-seed={seed}", f"-max_total_time={seconds}"]
        limits.append(f"-artifact_prefix={findings}/")
        begin = time.monotonic()
        with self.log.open("wb") as log:
            self.status = subprocess.run(
                [*self.command, *limits, str(self.grown), str(self.corpus)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            ).returncode
        self.seconds = time.monotonic() - begin
        self.findings = sorted(set(findings.iterdir()) - known)
        self.look()

    def look(self) -> None:
        """Reads what the program has said so far."""
        if not self.log.exists():
            return
        text = self.log.read_text(encoding="utf-8", errors="replace")
        if lines := STATUS.findall(text):
            self.executions, self.edges, self.corpus_size = map(int, lines[-1])
        if total := EXECUTIONS.search(text):
            self.executions = int(total[1])


def all_targets() -> list[Target]:
    programs = BUILD / "tests_cpp" / "fuzz"
    targets = [
        Target(
            name := source.stem.removesuffix("_fuzz"),
            [str(programs / f"fuzz_{name}")],
            source.parent / "corpus" / name,
        )
        for source in sorted((ROOT / "tests_cpp" / "fuzz").glob("*_fuzz.cc"))
    ]
    folder = ROOT / "tests_py" / "fuzz"
    if importlib.util.find_spec("atheris") is None:
        print("Atheris has no wheel for this Python: the targets of tests_py/fuzz are left out.")
        return targets
    return targets + [
        Target(
            f"python_{corpus.name}",
            [sys.executable, "-m", "fuzz", corpus.name],
            corpus,
        )
        for corpus in sorted((folder / "corpus").iterdir())
    ]


def run_all(targets: list[Target], seconds: int, seed: int, jobs: int, console: Console) -> None:
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}")]
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        tasks = {
            target.name: progress.add_task(target.name, total=seconds, start=False, done="")
            for target in targets
        }
        running = {
            pool.submit(run_one, target, seconds, seed, progress, tasks[target.name]): target
            for target in targets
        }
        try:
            while pending := [future for future in running if not future.done()]:
                time.sleep(0.5)
                for future in pending:
                    if future.running():
                        show(running[future], progress, tasks[running[future].name])
        except KeyboardInterrupt:  # the programs have had it, too, and end
            pool.shutdown(cancel_futures=True)
            raise SystemExit(130) from None
        for future in running:
            future.result()


def run_one(target: Target, seconds: int, seed: int, progress: Progress, task: TaskID) -> None:
    target.log.unlink(missing_ok=True)
    progress.start_task(task)
    if progress.disable:
        print(f"{target.name}: {seconds} s", flush=True)
    target.run(seconds, seed)
    show(target, progress, task)
    if progress.disable or target.failed:
        state = {0: "done", INTERRUPTED: "interrupted"}.get(target.status, "FAILED")
        progress.console.print(f"{target.name}: {state}, {target.executions:,} executions")


def show(target: Target, progress: Progress, task: TaskID) -> None:
    target.look()
    elapsed = progress.tasks[task].elapsed or 0
    progress.update(
        task,
        completed=min(elapsed, progress.tasks[task].total or 0),
        done=f"{target.executions:,} executions, {target.edges} edges",
    )


def table_of(targets: list[Target]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("target")
    for name in ("executions", "exec/s", "edges", "corpus", "findings"):
        table.add_column(name, justify="right")
    for target in targets:
        rate = target.executions / target.seconds if target.seconds else 0
        numbers = (target.executions, round(rate), target.edges, target.corpus_size)
        findings = len(target.findings) or int(target.failed)
        table.add_row(target.name, *(f"{number:,}" for number in (*numbers, findings)))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=30, help="for each target (default: 30)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the changes tried (default: 0, another each time)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time (default: 2)")
    parser.add_argument("targets", nargs="*", help="names of targets (default: all)")
    options = parser.parse_args()
    targets = all_targets()
    names = [target.name for target in targets]
    if unknown := sorted(set(options.targets) - set(names)):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(names)}")
    if options.targets:
        targets = [target for target in targets if target.name in options.targets]
    for target in targets:
        if not Path(target.command[0]).exists():
            parser.error(f"{target.command[0]} is not there: make fuzz builds it")
    console = Console()
    run_all(targets, options.seconds, options.seed, options.jobs, console)
    console.print(table_of(targets))
    failed = [target for target in targets if target.failed]
    for target in failed:
        print(f"\n{target.name} failed; the end of {target.log}:")
        print("\n".join(target.log.read_text(errors="replace").splitlines()[-40:]))
        for finding in target.findings:
            print(f"Run it alone: PYTHONPATH={PYTHONPATH} {' '.join(target.command)} {finding}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
