# SPDX-License-Identifier: Apache-2.0
"""Gain of spinning pool threads for short calls, and its cost for other work.

    python bench/bench_threads.py [--quick] [--spins 0,50,200] [--threads N]

A process for each CPATTN_SPIN_US, all in turns: short calls after pauses in which the caller is
busy; calls between products of torch in the same process, as in the layers of a model, there also
on torch's threads; and calls beside another process that multiplies all the time. Prints figures
and keeps none. One minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)
from rich.table import Table

from bench.harness import command
from bench.harness.contender import Contender
from bench.harness.environment import environment
from bench.harness.figures import Row
from bench.harness.report import console
from bench.threads.worker import CALLS
from cpattn import _core

PAUSES = (0, 10, 30, 100, 300, 1000)  # microseconds
#: How long OpenMP's threads spin after a product: some tenths of a millisecond, and GNU's default.
OPENMP = {"GOMP_SPINCOUNT=30000": {"GOMP_SPINCOUNT": "30000"}, "OpenMP's default": {}}
Measure = Callable[[Contender], Row]


def contender(
    spin: int, threads: int, variables: Mapping[str, str], pool: str = "cpattn"
) -> Contender:
    program = [sys.executable, "-m", "bench.threads.worker", str(threads), pool]
    name = f"{spin}" if pool == "cpattn" else f"{pool}'s threads"
    return Contender(name, program, threads, {"CPATTN_SPIN_US": str(spin), **variables})


def in_turns(contenders: list[Contender], rounds: int, measure: Measure) -> list[list[Row]]:
    """The rows of each process, one for each round."""
    rows: list[list[Row]] = [[] for _ in contenders]
    for _ in range(rounds):
        for one, own in zip(contenders, rows, strict=True):
            own.append(measure(one))
    return rows


def ask(do: str, arguments: Row, one: Contender) -> Row:
    return one.ask(do, **arguments)


def said(rows: list[Row]) -> str:
    """Microseconds: the median of the rounds, and the 90th percentile of calls."""
    middle, ninetieth = (median(row[name] for row in rows) for name in ("median", "ninetieth"))
    return f"{1e6 * middle:.1f} ({1e6 * ninetieth:.1f})"


def after_pauses(contenders: list[Contender], rounds: int, times: int) -> None:
    for call in CALLS:
        table = Table(title=f"{call}: µs of a call (90 % within) after a pause of so many µs")
        for name in ("spin, µs", *map(str, PAUSES)):
            table.add_column(name, justify="right")
        columns = []
        for pause in PAUSES:
            asked = {"call": call, "pause": 1e-6 * pause, "times": times}
            columns.append(in_turns(contenders, rounds, partial(ask, "after_pauses", asked)))
        for one, *rows in zip(contenders, *columns, strict=True):
            table.add_row(one.name, *map(said, rows))
        console().print(table)


def between_products(contenders: list[Contender], about: str, rounds: int, times: int) -> None:
    call = [*CALLS][-1]
    table = Table(title=f"{call}, in turn with a product of torch, {about}: µs (90 % within)")
    for name in ("spin, µs", "call", "product", "both"):
        table.add_column(name, justify="right")
    asked = {"call": call, "times": times}
    rows = in_turns(contenders, rounds, partial(ask, "in_turn", asked))
    for one, own in zip(contenders, rows, strict=True):
        table.add_row(one.name, *(said([row[name] for row in own]) for name in own[0]))
    console().print(table)


def beside_another(
    contenders: list[Contender], other: Contender, rounds: int, seconds: float
) -> None:
    """Products of another process on the same CPUs, while this one calls and pauses."""
    call, pause = "empty", 1e-4
    table = Table(title=f"another process multiplies, beside {call} calls 100 µs apart")
    for name in ("spin, µs", "µs of a call (90 % within)", "its products a second"):
        table.add_column(name, justify="right")

    def measure(one: Contender) -> Row:
        with ThreadPoolExecutor(1) as pool:
            products = pool.submit(other.ask, "products", seconds=seconds)
            calls = one.ask("calls_for", seconds=seconds, call=call, pause=pause)
            return calls | products.result()

    # The first call starts the process in this thread, with which it ends.
    alone = [other.ask("products", seconds=seconds)["rate"] for _ in range(rounds)]
    rows = in_turns(contenders, rounds, measure)
    for one, own in zip(contenders, rows, strict=True):
        table.add_row(one.name, said(own), f"{median(row['rate'] for row in own):.0f}")
    table.add_row("no calls", "", f"{median(alone):.0f}")
    console().print(table)


def main() -> int:
    parser = command.parser(__doc__, quick="a few calls")
    parser.add_argument("--spins", default="0,50,200,1000", help="values of CPATTN_SPIN_US")
    parser.add_argument("--threads", type=int, default=_core.default_num_threads())
    arguments = parser.parse_args()
    rounds, times, seconds = (1, 20, 0.05) if arguments.quick else (5, 500, 0.5)
    spins = [int(spin) for spin in arguments.spins.split(",")]
    about = environment()
    console().print(
        f"{about['machine']}, {arguments.threads} threads, {about['isa']}, torch {about['torch']}, "
        f"{about['commit']}, {about['date']}; medians of {rounds} rounds"
    )
    for name, variables in OPENMP.items():
        contenders = [contender(spin, arguments.threads, variables) for spin in spins]
        other = contender(0, arguments.threads, variables)
        on_torch = contender(0, arguments.threads, variables, "torch")
        try:
            if name == next(iter(OPENMP)):
                after_pauses(contenders, rounds, times)
            between_products([*contenders, on_torch], name, rounds, times)
            if name == next(iter(OPENMP)):
                beside_another(contenders, other, rounds, seconds)
        finally:
            for one in (*contenders, other, on_torch):
                one.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
