# SPDX-License-Identifier: Apache-2.0
"""Check that ranks work on these machines, and time them; run by `torchrun` on all of them::

    torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr 192.0.2.1 \\
        -m cpattn_lab.check

Every rank plans a ragged batch with cached prefixes, writes KV, attends and gathers, for every
strategy, then with shared pools for every placement and exchange. It compares results with the
float64 oracle, then times larger batches. Rank 0 prints a line for each rank, the rates of the
network as options of `cpattn plan`, and the time of a layer with each exchange. The exit code is 1
on all ranks if a row is wrong, a rank is lost, or the ranks disagree.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from cpattn import _core
from cpattn._core import __version__, active_isa
from cpattn.context_parallel.exchanges import ON_ALL_RANKS
from cpattn.doctor.roundings import DTYPES
from cpattn_terminal import streams
from cpattn_terminal.exit_codes import INTERRUPTED
from cpattn_terminal.progress import ProgressBar, ProgressLines, make_progress

from .batch import DIM, HEADS, CheckBatch, Way, all_ways, largest_error
from .measure import measure_exchange
from .report import REPLICATED, CheckReport

Progress = ProgressBar | ProgressLines


def main() -> int:
    """Run the check; return the exit code."""
    streams.prepare()
    try:
        options = _parse()
        with _progress() as progress:
            code = _run(options, progress)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _failed("this process", "interrupted")
        return INTERRUPTED
    except OSError as error:
        streams.abandon(sys.stdout)
        return _failed("this process", f"writing the result: {error.strerror or error}")


def _progress() -> Progress:
    """Give rank 0 a bar; other ranks must not overwrite it, and print lines until all have met."""
    name = "cpattn_lab.check"
    return (
        ProgressLines(name) if os.environ.get("RANK", "0") != "0" else make_progress(name, "steps")
    )


def _run(options: argparse.Namespace, progress: Progress) -> int:
    progress(0, None, "waiting for the other ranks")
    try:
        _interruptible(
            lambda: dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
        )
    except (RuntimeError, ValueError) as error:
        hint = "" if "RANK" in os.environ else "; start it with torchrun"
        return _failed("this process", f"{_first_line(error)}{hint}")
    rank = dist.get_rank()
    if rank:
        progress.stop()  # only rank 0 goes on
    try:
        passed = _check(options, progress)
        progress(0, None, "waiting for the other ranks")
        _interruptible(dist.barrier)
    except (RuntimeError, MemoryError) as error:
        return _failed(f"rank {rank} on {socket.gethostname()}", _first_line(error))
    dist.destroy_process_group()
    return 0 if passed else 1


def _interruptible(wait: Callable[[], object]) -> None:
    """Wait for other processes in a thread, since Ctrl-C within torch waits for the timeout."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        try:
            waiting.result()
        except KeyboardInterrupt:
            _failed("this process", "interrupted")
            os._exit(INTERRUPTED)  # the thread still waits


class _Parser(argparse.ArgumentParser):
    """Parser with one-line errors, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cpattn_lab.check: {message}\n")


def _parse() -> argparse.Namespace:
    parser = _Parser(
        prog="python -m cpattn_lab.check",
        description="Context-parallel attention over all ranks against a float64 oracle, timed.",
        epilog="Start it with torchrun on every machine.",
    )
    count, seconds = _up_to(1 << 20, int), _up_to(1e6, float)
    parser.add_argument(
        "--tokens", type=count, default=2048, help="new tokens of each rank in the timed batch"
    )
    parser.add_argument(
        "--cached",
        type=count,
        default=4096,
        help="cached tokens of each rank in the timed exchanges",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--repeats", type=count, default=3, help="number of timed calls; the fastest counts"
    )
    parser.add_argument("--timeout", type=seconds, default=60.0, help="seconds to wait for a rank")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def _up_to(most: float, kind: type) -> Callable[[str], Any]:
    """Parse a positive number up to `most`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value <= most:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"must be {what} > 0 and <= {most:.0f}, got {text[:40]!r}"
            )
        return value

    return parse


def _check(options: argparse.Namespace, progress: Progress) -> bool:
    """Return whether all rows of all ranks are correct; rank 0 prints."""
    group = dist.group.WORLD
    assert group is not None
    errors = []
    tried = list(all_ways())
    steps = len(tried) + 3
    for i, way in enumerate(tried):
        progress(i, steps, f"{way} against the oracle")
        errors.append(largest_error(group, way, options.dtype))
    progress(steps - 3, steps, "timing attention")
    timed = _timed(group, options)
    mine = {
        "host": socket.gethostname(),
        "version": __version__,
        "cpus": _cpus(),
        "threads": _core.default_num_threads(),
        "isa": active_isa(),
        "error": float(np.max(errors)),  # NaN if one is NaN
        **timed,
    }
    progress(steps - 2, steps, "timing the network")
    network = measure_exchange(group)
    progress(steps - 1, steps, "timing exchanges")
    exchanges = _timed_exchanges(group, options)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    passed = all(answer["error"] <= 1 for answer in ranks)
    if dist.get_rank() == 0:
        progress.stop()
        report = CheckReport(passed, ranks, network, exchanges, vars(options))
        print(report.to_json() if options.json else "\n".join(report.lines()))
    return passed


def _timed(group: dist.ProcessGroup, options: argparse.Namespace) -> dict[str, float]:
    """Return seconds of attend and write_kv on this rank, and the rate of attend."""
    tokens = options.tokens * dist.get_world_size(group)
    batch = CheckBatch(group, Way(), np.array([tokens]), np.array([0]), options.dtype)
    write, attend = (
        min(_seconds(call) for _ in range(options.repeats))
        for call in (batch.write_kv, batch.attend)
    )
    pairs = int(batch.plan.metadata.query_cache_lengths.sum(dtype=np.int64))
    gflops = 4 * pairs * HEADS * DIM / attend / 1e9
    return {"attend": attend, "write_kv": write, "gflops": gflops}


def _timed_exchanges(group: dist.ProcessGroup, options: argparse.Namespace) -> dict[str, float]:
    """Return seconds of a layer with new rows on the slowest rank, for each exchange."""
    new, cached = (
        np.array([n * dist.get_world_size(group)]) for n in (options.tokens, options.cached)
    )
    names = {None: REPLICATED} | {name: name for name in ON_ALL_RANKS}
    found = {}
    for exchange, name in names.items():
        batch = CheckBatch(group, Way(exchange=exchange, one_call=True), new, cached, options.dtype)
        batch.layer()  # set up connections and buffers
        times = []
        for _ in range(options.repeats):
            dist.barrier(group)
            slowest = torch.tensor([_seconds(batch.layer)])
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
            times.append(float(slowest))
        found[name] = min(times)
    return found


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _cpus() -> str:
    """Return the CPUs that this process may use, in the form of taskset."""
    cpus = np.array(sorted(os.sched_getaffinity(0)))
    runs = np.split(cpus, np.flatnonzero(np.diff(cpus) > 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _failed(who: str, why: str) -> int:
    print(f"cpattn_lab.check: {who}: {why}", file=sys.stderr)
    return 1
