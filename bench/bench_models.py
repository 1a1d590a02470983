# SPDX-License-Identifier: Apache-2.0
"""A model over two ranks of one machine, by the engine, against one process on both cores.

    python bench/bench_models.py [--quick] [--only TEXT] [--long]
    python bench/bench_models.py --trace FILE [--requests 40] [--scale-lengths 8]

Six layers of Qwen3-0.6B's width, random weights in bfloat16, or float32 where that is faster. One
process with two threads has transformers' sdpa, or cpattn's attention; the engine has one rank with
two threads, or two ranks with one. Answers are compared before anything is timed; then all take
turns. Beside each time of the engine is the cost model's prediction, with a measured remainder
without attention. sdpa skips the longest prompt, which takes it minutes, except with --long. With
--trace the first requests of the trace also go through `submit` and `step`. Needs transformers;
some minutes on two idle cores with instructions for bfloat16, several times as many without:
--longest shortens it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from rich.table import Table

from bench.harness import command, program
from bench.harness.figures import Row, duration
from bench.harness.report import console
from cpattn import torch_guard

PAGE_SIZE = 16


def parse_arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, quick="a small model, short prompts, three requests")
    parser.add_argument("--only", default="", help="cases with this text, not kept")
    parser.add_argument("--budget", type=float, default=6, help="seconds of samples of a peer")
    parser.add_argument("--long", action="store_true", help="sdpa has the longest prompt, too")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest prompt")
    command.add_trace(parser)
    parser.add_argument("--requests", type=int, default=40, help="of the trace")
    parser.add_argument("--scale-lengths", type=int, default=8, help="divisor of its lengths")
    parser.add_argument("--seed", type=int, default=0, help="of its tokens")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.scale_lengths = 3, 16
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if find_spec("transformers") is None:
        print("bench_models.py: skipped, transformers is not installed")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(arguments, Path(folder))
        return program.measure("models", arguments, (), rows, whole=bool(arguments.trace))


def rows_of(arguments: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    from bench.models import peers, steps, trace
    from bench.models.forecast import Forecasts, layer_of
    from bench.serving import load, model

    quick = arguments.quick
    sizes = peers.QUICK if quick else peers.Sizes(long=arguments.longest)
    work = load.from_arguments(arguments, model.VOCABULARY) if arguments.trace else None
    tokens = max(sizes.max_tokens, 2 * work.max_tokens if work else 0)
    dtype = peers.fastest_dtype()
    model.write_qwen3(folder, quick=quick, max_tokens=tokens)
    chosen = [case for case in steps.cases(sizes) if arguments.only in case.name]
    others = peers.alone(folder, dtype)
    engines = [*peers.engines(folder, dtype, tokens // PAGE_SIZE)]
    try:
        layer = layer_of(dtype, quick=quick)
        known = Forecasts.measured(layer) if quick else None
        for case in chosen:
            of = steps.of_case([*others, *engines], case, long=arguments.long)
            budget = 0.01 if quick else arguments.budget
            before = (known or Forecasts.measured(layer)).of(of, case)
            rows = steps.measure(of, case, budget, dtype)
            after = before if known else Forecasts.measured(layer).of(of, case)
            steps.add_predictions(rows, [before, after])
            print_forecasts(case.name, rows)
            yield rows
    finally:
        for peer in (*others, *engines):
            peer.stop()
    if work and arguments.only in "trace":
        started = peers.engines(folder, trace.DTYPE, tokens // PAGE_SIZE)
        yield trace.serve(started, work, folder, arguments)


def print_forecasts(name: str, rows: list[Row]) -> None:
    table = Table(title=name, title_justify="left")
    for column in ("", "time", "predicted", "off by", "efficiency", "memory of each rank"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        if "predicted" not in row or "median" not in row:
            continue
        table.add_row(
            row["implementation"],
            duration(row["median"]),
            duration(row["predicted"]),
            f"{row['predicted'] / row['median'] - 1:+.0%}",
            f"{row['efficiency']:.0%}" if "efficiency" in row else "",
            ", ".join(f"{kept / 2**20:.0f} MiB" for kept in row["kept_bytes"]),
        )
    console().print(table)


if __name__ == "__main__":
    if message := torch_guard.prepare():
        print(message)
    raise SystemExit(main())
