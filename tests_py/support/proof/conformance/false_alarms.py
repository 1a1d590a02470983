# SPDX-License-Identifier: Apache-2.0
"""Operators that are right, on many more cases than tests have time for: none may raise a finding.

Rounds of cases go to the operators in turn, each with the seed that the line says, by which
``cpattn conform`` makes them again. Edges come with each round and are counted once. An operator
that cannot be imported, as that of a package that is not installed, is named and left out.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from cpattn_proof import NotUsable, Report, conform

from .gpu_operators import GPU
from .right_operators import ATTENTION, SELECTIONS, VLLM, RightOperator

ROUND = 250  # cases besides those at the edges
SECONDS_OF_A_CALL = 120.0  # of a busy machine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of all operators together")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    parser.add_argument("--device", default="cpu", help="where tensors live, as torch names it")
    parser.add_argument("--jobs", type=int, default=1, help="operators that are tried at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of an operator's round")
    options = parser.parse_args(arguments)
    known = ATTENTION | SELECTIONS | VLLM if options.device == "cpu" else GPU
    chosen = {
        name: operator
        for name, operator in known.items()
        if (options.only in name if options.only else name not in VLLM)
    }
    if not chosen:
        parser.error(f"--only must be in one of {', '.join(known)}, got {options.only!r}")
    counts, alarms = run(chosen, options)
    for name, count in counts.items():
        print(f"{name}, {chosen[name].package} {release(chosen[name].package)}: {count:,} cases")
    print(f"{sum(counts.values()):,} cases, {alarms} false alarms")
    return 1 if alarms else 0


def run(
    operators: dict[str, RightOperator], options: argparse.Namespace
) -> tuple[dict[str, int], int]:
    """Cases that each operator answered, and how many rounds had a finding."""
    counts: Counter[str] = Counter()
    alarms, begin, seed, left = 0, time.monotonic(), options.seed, dict(operators)
    # The process that forks an operator's has not used the device, and has one thread.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        each = map if options.jobs == 1 else pool.map
        while left and sum(counts.values()) < options.cases:
            examples = min(ROUND, options.cases - sum(counts.values()))
            attempt = partial(
                attempted, examples=examples, seed=seed, seconds=options.seconds,
                device=options.device,
            )  # fmt: skip
            for name, report in zip(list(left), each(attempt, list(left.values())), strict=False):
                if isinstance(report, str):
                    print(f"{name}: left out: {report}", flush=True)
                    del left[name]
                    continue
                again = report.facts["edges"] if name in counts else 0
                counts[name] += max(1, report.facts["answered"] - again)
                kinds = {finding.kind for finding in report.findings}  # that it refuses is none
                are_known = kinds <= {*operators[name].known}
                alarms += not are_known
                if kinds:
                    what = "as known" if are_known else "a false alarm"
                    print(f"{name}: {what}\n{report.text()}", flush=True)
                print(
                    f"{sum(counts.values()):,} of {options.cases:,} cases, "
                    f"{time.monotonic() - begin:,.0f} s: {name}, seed {seed}, "
                    f"{report.facts['answered']} answered, {len(report.findings)} findings",
                    flush=True,
                )
                if sum(counts.values()) >= options.cases and options.jobs == 1:
                    break
            seed += 1
    return dict(counts), alarms


def attempted(
    operator: RightOperator, *, examples: int, seed: int, seconds: float, device: str
) -> Report | str:
    try:
        return conform(
            operator.path, signature=operator.signature, without=operator.without,
            examples=examples, seed=seed, seconds=seconds, device=device,
            time_limit=SECONDS_OF_A_CALL,
        )  # fmt: skip
    except NotUsable as error:
        return str(error)


def release(package: str) -> str:
    """Return a distribution's version; this library need not be installed to have one."""
    try:
        if package == "cpattn":
            return str(import_module(package).__version__)
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
