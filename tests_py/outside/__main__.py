# SPDX-License-Identifier: Apache-2.0
"""Runs suites of other projects on cpattn and prints what came out beside what was expected."""

import argparse
import sys

from cpattn import torch_guard
from outside import page, suite


def main() -> int:
    expected = suite.read_expected()
    parser = argparse.ArgumentParser(prog="python -m outside", description=__doc__)
    add = parser.add_argument
    add("suites", nargs="*", metavar="SUITE", help=", ".join(expected))
    add("--write", action="store_true", help=f"run nothing, and write {page.PAGE.name}")
    add("--all", action="store_true", help="run all cases of suites that have a sample, uncounted")
    add("--seed", type=int, default=0, help="run another sample, such as that of a date, uncounted")
    size = suite.COUNTED.size
    add("--size", type=int, default=size, help=f"cases of each test in it (default: {size})")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(expected):
        parser.error(f"no suite {', '.join(sorted(unknown))}")
    if options.write:
        page.write(expected)
        return 0
    chosen = {name: expected[name] for name in options.suites or expected}
    if absent := sorted({reason for entry in chosen.values() for reason in suite.missing(entry)}):
        sys.exit(f"outside: {'; '.join(absent)}: `make test-outside` sees to that")
    torch_guard.prepare()
    sample = suite.Sample(None if options.all else options.size, options.seed)
    results = {name: suite.run_suite(name, entry, sample) for name, entry in chosen.items()}
    for result in results.values():
        print(*(f"{name}: {error}\n" for name, error in result.failed.items()), sep="", end="")
    print(page.aligned(page.rows({n: e | results[n].counts() for n, e in chosen.items()})))
    if sample != suite.COUNTED:
        return 1 if any(result.failed for result in results.values()) else 0
    wrong = [line for n, e in chosen.items() for line in suite.complaints(n, results[n], e)]
    print(*(f"{line}\n" for line in wrong), sep="", end="")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
