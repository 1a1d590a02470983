# SPDX-License-Identifier: Apache-2.0
"""sglang's engine on a CPU, with torch_native and with cpattn: steps, and a trace served.

    python bench/bench_sglang_engine.py [--quick] [--parts steps,trace] [--only TEXT]
    python bench/bench_sglang_engine.py --parts trace [--trace FILE] [--requests N]

Needs an environment with sglang for a CPU (docs/how_to/sglang.md) and cpattn. The model has six
layers of Qwen3-0.6B's width, random weights in bfloat16 and a vocabulary of 8,192. Two engines,
each in its own process, take turns.

`steps` times prompts that are not in the cache, each one step, and steps that decode a batch behind
contexts; before, tokens and log probabilities of both are compared, on the same prompts. `trace`
sends requests of a trace to the OpenAI endpoint of two servers, which stream: all at once, then as
they arrive in the trace, at a pace that keeps torch_native busy for `--load` of the time. Lengths
are divided by `--scale-lengths`; tokens are random, but equal where the trace marks them as equal.

A run of both parts keeps its results; a quarter of an hour on two cores, most of it torch_native's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.harness import command, program
from bench.harness.contender import Failed
from bench.harness.figures import Row
from bench.serving import load, served, sglang_steps, sglang_trace, steps
from bench.serving.report import print_served
from bench.serving.sglang_process import BACKENDS

PARTS = ("steps", "trace")
PAGE_SIZE = 128  # as in the trial that set the bars


def parse_arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, quick="a tiny model, short prompts, three requests")
    command.add_trace(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, by commas")
    parser.add_argument("--only", default="", help="steps with this text, not kept")
    parser.add_argument("--rounds", type=int, default=5, help="of each engine and step")
    parser.add_argument("--turns", type=int, default=1, help="of each server and load")
    parser.add_argument("--requests", type=int, default=10, help="from the start of the trace")
    parser.add_argument(
        "--scale-lengths", type=int, default=8, choices=(1, 2, 4, 8, 16), help="divide all lengths"
    )
    parser.add_argument("--load", type=float, default=0.7, help="of the second turns; 1 saturates")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of each engine")
    parser.add_argument("--seed", type=int, default=1, help="of generated traffic and tokens")
    arguments = parser.parse_args()
    arguments.parts = arguments.parts.split(",")
    if unknown := set(arguments.parts) - {*PARTS}:
        parser.error(f"--parts: {', '.join(unknown)}, of {', '.join(PARTS)}")
    if arguments.quick:
        arguments.requests, arguments.rounds, arguments.turns = 3, 1, 1
        arguments.scale_lengths = 16
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if find_spec("sglang") is None:
        print("bench_sglang_engine: sglang is not installed in this environment, so nothing is run")
        return 0
    whole = {*PARTS} == {*arguments.parts} and not arguments.only
    kept = argparse.Namespace(quick=arguments.quick, only="" if whole else "a part", budget=0.0)
    with tempfile.TemporaryDirectory() as name:
        try:
            return program.measure("sglang_engine", kept, (), cases(arguments, Path(name)))
        except Failed as failed:
            print(f"bench_sglang_engine: {failed.status}: {failed}")
            return 1


def cases(arguments: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    from bench.serving import model  # wants transformers

    chosen = sglang_steps.QUICK_CASES if arguments.quick else sglang_steps.CASES
    longest = max(case.max_tokens for case in chosen) + PAGE_SIZE * max(c.batch for c in chosen)
    work = load.from_arguments(arguments, model.VOCABULARY)
    sequence = max(work.max_tokens, longest) + PAGE_SIZE  # sglang keeps a few for itself
    model.write_qwen3(folder, quick=arguments.quick, max_tokens=sequence)
    if "steps" in arguments.parts:
        tokens = pages(2 * longest)  # what was cached is not taken back while it is measured
        engines = sglang_steps.engines_of(folder, arguments.threads, PAGE_SIZE, tokens)
        try:
            for engine in engines:
                engine.start()
            for case in chosen:
                if arguments.only in case.name:
                    rounds, threads = arguments.rounds, arguments.threads
                    yield steps.measure(engines, case, rounds, threads)
        finally:
            for engine in engines:
                engine.stop()
    if "trace" in arguments.parts:
        yield from serve(arguments, folder, work)


def serve(arguments: argparse.Namespace, folder: Path, work: load.Load) -> Iterator[list[Row]]:
    """All requests at once, and as they arrive; each load is warmed up by the one before."""
    page = min(PAGE_SIZE, 512 // arguments.scale_lengths)
    needed = sum(map(len, work.prompts)) + sum(work.output_lengths)
    tokens = pages(needed + len(work.prompts) * PAGE_SIZE)
    about = served.about(arguments, work)
    servers: list[sglang_trace.Server] = []
    try:
        for backend in BACKENDS:
            servers.append(sglang_trace.Server(backend, folder, arguments.threads, page, tokens))
        for server in servers:
            server.wait()
        for server in servers:
            server.serve(work, 0.0)  # not timed: torch sets itself up
        at_once = sglang_trace.take_turns(servers, arguments.turns, work, 0.0)
        seconds = median(turn.wall for turn in at_once["torch_native"])
        pace = seconds / arguments.load / work.span
        arriving = sglang_trace.take_turns(servers, arguments.turns, work, pace)
    finally:
        for server in servers:
            server.stop()
    threads = arguments.threads
    loads = (
        ("trace, all requests at once", at_once, 0.0),
        ("trace, as requests arrive", arriving, pace * work.span),
    )
    for name, turns, seconds in loads:
        about["seconds_of_arrivals"] = seconds
        rows = served.rows_of(name, work, turns, threads, about)
        print_served(name, work, rows)
        yield rows


def pages(tokens: int) -> int:
    """Rounded up to whole ones."""
    return -(-tokens // PAGE_SIZE) * PAGE_SIZE


if __name__ == "__main__":
    raise SystemExit(main())
