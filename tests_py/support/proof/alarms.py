# SPDX-License-Identifier: Apache-2.0
"""Command that counts the false alarms of a tool on random correct things."""

import argparse
import time
from collections.abc import Callable


def count_alarms(text: str, things: str, alarm_of: Callable[[int, int], str | None]) -> int:
    """Try things by their numbers, print each alarm, and return 1 if there was one."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument(f"--{things}", type=int, default=10_000, dest="number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one of them by its number")
    options = parser.parse_args()
    numbers = range(options.number) if options.only is None else [options.only]
    begin, alarms = time.monotonic(), 0
    for done, number in enumerate(numbers, 1):
        if (alarm := alarm_of(options.seed, number)) is not None:
            alarms += 1
            print(f"--only {number} --seed {options.seed}: {alarm}", flush=True)
        if done % 500 == 0 or done == len(numbers):
            seconds = time.monotonic() - begin
            print(f"{done:,} of {len(numbers):,}, {alarms} alarms, {seconds:.0f} s", flush=True)
    return 1 if alarms else 0
