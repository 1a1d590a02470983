# SPDX-License-Identifier: Apache-2.0
"""Does it work, and how fast, on these machines? For `torchrun`, on all of them at once::

    torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr 192.0.2.1 \\
        -m cpattn.distributed.check

Every rank plans a ragged batch with cached prefixes, writes KV, attends and gathers, for every
strategy, then with pools that the ranks share for every exchange, and compares with the float64
oracle; then times larger ones. Rank 0 prints a line for
each rank, and the rates of the network as options of `cpattn plan`. Exit code 1 on all ranks if
a row is wrong, a rank is lost, or the ranks disagree.
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

from .. import _core, reference
from .._cli import streams
from .._cli.exit_codes import INTERRUPTED
from .._cli.progress import ProgressBar, ProgressLines, make_progress
from .._cli.rates import as_options
from .._core import __version__, active_isa
from .._roundings import DTYPES, error_in_units
from ..kv import PageInterleave
from .context_parallel import ContextParallel
from .measure import measure_exchange
from .plan import ContextParallelPlan

Progress = ProgressBar | ProgressLines
STRATEGIES = ("zigzag", "interleave", "contiguous")
EXCHANGES = ("pass_q", "gather", "ring", "all_to_all")
_MERGED = ("pass_q", "ring")  # rounded twice: partial results, and what they are merged to
_HEADS, _KV_HEADS, _DIM, _PAGE = 8, 2, 128, 16


def main() -> int:
    """Run the check; the exit code."""
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
    """Rank 0 may have a bar; others are not to draw over it, and have lines until they have met."""
    name = "cpattn.distributed.check"
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
        progress.stop()  # one of them tells
    try:
        passed = _check(options, progress)
        progress(0, None, "waiting for the other ranks")
        _interruptible(dist.barrier)
    except (RuntimeError, MemoryError) as error:
        return _failed(f"rank {rank} on {socket.gethostname()}", _first_line(error))
    dist.destroy_process_group()
    return 0 if passed else 1


def _interruptible(wait: Callable[[], object]) -> None:
    """Have a thread wait for other processes: within torch, Ctrl-C would come after the timeout."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        try:
            waiting.result()
        except KeyboardInterrupt:
            _failed("this process", "interrupted")
            os._exit(INTERRUPTED)  # the thread still waits


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cpattn.distributed.check: {message}\n")


def _parse() -> argparse.Namespace:
    parser = _Parser(
        prog="python -m cpattn.distributed.check",
        description="Context-parallel attention over all ranks against a float64 oracle, timed.",
        epilog="Start it with torchrun on every machine.",
    )
    count, seconds = _up_to(1 << 20, int), _up_to(1e6, float)
    parser.add_argument("--tokens", type=count, default=2048, help="of a rank, in the timed batch")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=count, default=3, help="timed calls; the fastest counts")
    parser.add_argument("--timeout", type=seconds, default=60.0, help="seconds to wait for a rank")
    return parser.parse_args()


def _up_to(most: float, kind: type) -> Callable[[str], Any]:
    """Parses a positive number up to `most`."""

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
    """Whether all rows of all ranks are right; rank 0 prints."""
    group = dist.group.WORLD
    assert group is not None
    errors = []
    tried = [(strategy, None) for strategy in STRATEGIES] + [("zigzag", each) for each in EXCHANGES]
    steps = len(tried) + 2
    for i, (strategy, exchange) in enumerate(tried):
        progress(i, steps, f"{exchange or strategy} against the oracle")
        error = _largest_error(group, strategy, options.dtype, exchange)
        errors.append(error / 2 if exchange in _MERGED else error)
    progress(steps - 2, steps, "timing attention")
    timed = _timed(group, options)
    mine = {
        "host": socket.gethostname(),
        "version": __version__,
        "cpus": _cpus(),
        "threads": _core.default_num_threads(),
        "isa": active_isa(),
        "error": float(np.max(errors)),  # NaN if one is
        **timed,
    }
    progress(steps - 1, steps, "timing exchanges")
    network = measure_exchange(group)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    passed = all(answer["error"] <= 1 for answer in ranks)
    if dist.get_rank() == 0:
        progress.stop()
        _print(ranks, network, options, passed)
    return passed


def _print(
    ranks: list[dict[str, Any]],
    network: dict[str, float],
    options: argparse.Namespace,
    passed: bool,
) -> None:
    width = max(len(answer["host"]) for answer in ranks)
    for rank, answer in enumerate(ranks):
        print(
            f"rank {rank:<2} {answer['host']:{width}}  CPUs {answer['cpus']}  "
            f"threads {answer['threads']}  {answer['isa']}  error {answer['error']:.2f}  "
            f"attend {1e3 * answer['attend']:.3g} ms  {answer['gflops']:.0f} GFLOP/s  "
            f"write_kv {1e3 * answer['write_kv']:.3g} ms"
        )
    for name in ("version", "threads", "isa"):
        values = list(dict.fromkeys(str(answer[name]) for answer in ranks))
        if len(values) > 1:
            print(f"note: ranks differ in {name}: {', '.join(values)}")
    if network:
        slowest = min(ranks, key=lambda answer: answer["gflops"])
        rates = {"gflops": slowest["gflops"], "threads": slowest["threads"], **network}
        print(f"rates: {as_options(rates)}")
    print(
        f"{'passed' if passed else 'FAILED'}: cp_size {len(ranks)}, "
        f"{', '.join((*STRATEGIES, *EXCHANGES))}, {options.dtype}; errors up to 1 are roundings"
    )


def _largest_error(
    group: dist.ProcessGroup, strategy: str, dtype: str, exchange: str | None
) -> float:
    """Of a small ragged batch, in units of a rounding; on shared pools if there is an exchange."""
    size = dist.get_world_size(group)
    extends = np.array([2 * size + 5, 1, 7 * size + 3, 0, 3])
    prefixes = np.array([0, 40, 19, 8, _PAGE])
    batch = _Batch(group, strategy, extends, prefixes, dtype, exchange)
    batch.write_kv()
    gathered = batch.cp.gather(batch.plan, batch.attend())
    sequences: dict[str, Any] = {
        "q_lens": extends,
        "kv_lens": extends + prefixes,
        "block_tables": batch.tables,
    }
    expected, _ = reference.paged_attention(batch.q, batch.k, batch.v, **sequences)
    magnitude, _ = reference.paged_attention(batch.q, batch.k, batch.v.abs(), **sequences)
    return error_in_units(gathered.double().numpy(), expected, magnitude, dtype)


def _timed(group: dist.ProcessGroup, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of attend and write_kv of this rank, and the rate of attend."""
    tokens = options.tokens * dist.get_world_size(group)
    batch = _Batch(group, "zigzag", np.array([tokens]), np.array([0]), options.dtype)
    write, attend = (
        min(_seconds(call) for _ in range(options.repeats))
        for call in (batch.write_kv, batch.attend)
    )
    pairs = int(batch.plan.metadata.query_cache_lengths.sum(dtype=np.int64))
    gflops = 4 * pairs * _HEADS * _DIM / attend / 1e9
    return {"attend": attend, "write_kv": write, "gflops": gflops}


class _Batch:
    """A batch with the same random inputs on all ranks; the pools of this rank hold the prefixes.

    k and v are the whole pools as they should be, k_cache and v_cache those of this rank, which are
    a share of them if there is an exchange.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        strategy: str,
        extends: np.ndarray[Any, Any],
        prefixes: np.ndarray[Any, Any],
        dtype: str,
        exchange: str | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        placement = PageInterleave(shard_size=dist.get_world_size(group), page_size=_PAGE)
        self.cp = ContextParallel(
            group,
            strategy=strategy,
            page_size=_PAGE,
            placement=placement if exchange else None,
            exchange=exchange or "auto",
        )
        pages = -(-(extends + prefixes) // _PAGE)
        order = torch.randperm(int(pages.sum()), generator=generator).numpy()
        self.tables = np.full((len(extends), pages.max()), -1, np.int32)
        self.tables[np.arange(pages.max()) < pages[:, None]] = order
        self.plan: ContextParallelPlan = self.cp.plan(
            extends, extends + prefixes, block_tables=self.tables
        )
        kind = getattr(torch, dtype)
        shape = (len(order), _PAGE, _KV_HEADS, _DIM)
        self.q = torch.randn(int(extends.sum()), _HEADS, _DIM, generator=generator).to(kind)
        self.k, self.v = (torch.randn(shape, generator=generator).to(kind) for _ in "kv")
        slots = torch.tensor(self.plan.slots)
        new = [x.flatten(0, 1)[slots] for x in (self.k, self.v)]
        self.k_cache, self.v_cache = self.k.clone(), self.v.clone()
        for cache in (self.k_cache, self.v_cache):
            cache.flatten(0, 1)[slots] = torch.nan
        if exchange:
            pages = -(-len(order) // placement.shard_size)
            rows = np.arange(pages * _PAGE)
            held = torch.from_numpy(placement.global_index(self.cp.cp_rank, rows)).view(-1, _PAGE)
            page_ids = (held[:, 0] // _PAGE).clamp(max=len(order) - 1)  # no rank's share is short
            self.k_cache, self.v_cache = self.k_cache[page_ids], self.v_cache[page_ids]
        self._rows = [self.cp.shard(self.plan, x) for x in new]
        self._q = self.cp.shard(self.plan, self.q)

    def write_kv(self) -> None:
        k, v = self._rows
        self.cp.write_kv(self.plan, k, v, self.k_cache, self.v_cache)

    def attend(self) -> torch.Tensor:
        out: torch.Tensor = self.cp.attend(self.plan, self._q, self.k_cache, self.v_cache)
        return out


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _cpus() -> str:
    """The CPUs this process may use, as taskset has them."""
    cpus = np.array(sorted(os.sched_getaffinity(0)))
    runs = np.split(cpus, np.flatnonzero(np.diff(cpus) > 1) + 1)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _failed(who: str, why: str) -> int:
    print(f"cpattn.distributed.check: {who}: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
