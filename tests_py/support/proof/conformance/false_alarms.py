# SPDX-License-Identifier: Apache-2.0
"""Operators that are right, on many more cases than tests have time for: none may raise a finding.

They come in rounds, whose seed makes ``cpattn conform`` try one again; edges are counted once.
"""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from cpattn_proof import NotUsable, conform

from .gpu_operators import GPU
from .right_operators import ATTENTION, SELECTIONS, VLLM, RightOperator

ROUND = 250  # cases besides those at the edges
SECONDS_OF_A_CALL = 120.0  # enough for a busy machine


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 without findings, 1 with false alarms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=600, help="cases of an operator, beside edges")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    parser.add_argument("--device", default="cpu", help="device of tensors, in torch")
    parser.add_argument("--jobs", type=int, default=1, help="operators that are tried at a time")
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="longest time of an operator's round"
    )
    options = parser.parse_args(arguments)
    known = ATTENTION | SELECTIONS | VLLM if options.device == "cpu" else GPU
    chosen = {
        name: operator
        for name, operator in known.items()
        if (options.only in name if options.only else name not in VLLM)
    }
    if not chosen:
        parser.error(f"--only must be in one of {', '.join(known)}, got {options.only!r}")
    # The process that forks the operator's process has not used the device and has one thread.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        each = map if options.jobs == 1 else pool.map
        counts, alarms = zip(*each(partial(tried, options=options), chosen.items()), strict=True)
    for (name, operator), count in zip(chosen.items(), counts, strict=True):
        print(f"{name}, {operator.package} {release(operator.package)}: {count:,} cases")
    print(f"{sum(counts):,} cases, {sum(alarms)} false alarms")
    return 1 if any(alarms) else 0


def tried(named: tuple[str, RightOperator], options: argparse.Namespace) -> tuple[int, int]:
    """Return how many cases an operator answered, and how many rounds had a false alarm."""
    (name, operator), count, alarms = named, 0, 0
    for seed, begin in enumerate(range(0, options.cases, ROUND), options.seed):
        try:
            report = conform(
                operator.path, signature=operator.signature, without=operator.without,
                examples=min(ROUND, options.cases - begin), seed=seed, seconds=options.seconds,
                device=options.device, time_limit=SECONDS_OF_A_CALL,
            )  # fmt: skip
        except NotUsable as error:
            print(f"{name}: left out: {error}", flush=True)
            break
        answered = report.facts["answered"]
        count += max(1, answered - (report.facts["edges"] if count else 0))
        kinds = {finding.kind for finding in report.findings}  # refusals are no findings
        if kinds:
            are_known = kinds <= {*operator.known}
            alarms += not are_known
            what = "as known" if are_known else "a false alarm"
            print(f"{name}: {what}\n{report.text()}", flush=True)
        print(f"{name}, seed {seed}: {answered} answered, {len(kinds)} findings", flush=True)
    return count, alarms


def release(package: str) -> str:
    """Return a distribution's version; this library has one even if it is not installed."""
    try:
        if package == "cpattn":
            return str(import_module(package).__version__)
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
