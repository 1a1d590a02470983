# SPDX-License-Identifier: Apache-2.0
"""Operators that are right, on many more cases than tests have time for: none may raise a finding.

With tests_py on PYTHONPATH:

    python -m support.proof.conformance.false_alarms --cases 10000 --seed 7
    python -m support.proof.conformance.false_alarms --only SDPA  # those whose name has this in it
    python -m support.proof.conformance.false_alarms --only vLLM  # by .venv-vllm/bin/python

Rounds of cases go to the operators in turn, each with the seed that the line says, by which
``cpattn conform`` makes them again. Edges come with each round and are counted once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

from cpattn_proof import conform

from .right_operators import ATTENTION, SELECTIONS, VLLM, RightOperator

ROUND = 250  # cases besides those at the edges
SECONDS_OF_A_ROUND = 3600.0
SECONDS_OF_A_CALL = 120.0  # of a busy machine


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if nothing was found, 1 if something was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="of all operators together")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    options = parser.parse_args(arguments)
    known = ATTENTION | SELECTIONS | VLLM
    chosen = {
        name: operator
        for name, operator in known.items()
        if (options.only in name if options.only else name not in VLLM)
    }
    if not chosen:
        parser.error(f"--only must be in one of {', '.join(known)}, got {options.only!r}")
    counts, alarms = run(chosen, options.cases, options.seed)
    for name, count in counts.items():
        print(f"{name}, {chosen[name].package} {release(chosen[name].package)}: {count:,} cases")
    print(f"{sum(counts.values()):,} cases, {alarms} false alarms")
    return 1 if alarms else 0


def run(operators: dict[str, RightOperator], cases: int, seed: int) -> tuple[dict[str, int], int]:
    """Cases that each operator answered, and how many rounds had a finding."""
    counts: Counter[str] = Counter()
    alarms, begin = 0, time.monotonic()
    while sum(counts.values()) < cases:
        for name, operator in operators.items():
            left = cases - sum(counts.values())
            if left <= 0:
                break
            examples = min(ROUND, left)
            report = conform(
                operator.path, signature=operator.signature, without=operator.without,
                examples=examples, seed=seed, seconds=SECONDS_OF_A_ROUND,
                time_limit=SECONDS_OF_A_CALL,
            )  # fmt: skip
            again = report.facts["edges"] if name in counts else 0
            counts[name] += max(1, report.facts["answered"] - again)
            if report.findings:  # that it refuses much is none
                alarms += 1
                print(f"{name}: a false alarm\n{report.text()}", flush=True)
            print(
                f"{sum(counts.values()):,} of {cases:,} cases, {time.monotonic() - begin:,.0f} s: "
                f"{name}, seed {seed}, {report.facts['answered']} answered, "
                f"{len(report.findings)} findings",
                flush=True,
            )
        seed += 1
    return dict(counts), alarms


def release(package: str) -> str:
    """Return a distribution's version; this library need not be installed to have one."""
    import cpattn

    try:
        return cpattn.__version__ if package == "cpattn" else version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
