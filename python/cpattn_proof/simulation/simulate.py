# SPDX-License-Identifier: Apache-2.0
"""Simulation of a program: runs all its ranks in one process, and reports faults."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..findings import Finding, NotUsable, Report
from ..requirements import require
from ..results.expect import collecting
from . import assertions, comparison
from .calls import PACKAGE, is_program
from .link import Link
from .process.cuda_as_cpu import CudaAsCpu
from .process.output import Output
from .process.process_patches import installed
from .process.rank_state import ProcessState, Randomness, set_aside
from .process_group import CUTS_ROWS
from .run import Run
from .timeline import counts_of, write_page, write_trace

SEEDS = (0, 1, 2)
_RESULTS = (
    "no rank calls cpattn_proof.expect; compared between orders, and by what the program asserts"
)
# The temporary replacements in torch and Python exist once per process.
_ALONE = threading.Lock()
# Packages that a process cannot import twice.
_SHARED = ("cpattn", "numpy", "sys", "torch")


@dataclass(frozen=True)
class Options:
    """Options of a simulation.

    Attributes
    ----------
    ranks : int
        Number of ranks, 1 to 64.
    seeds : sequence of int
        Orders in which ranks run; with 0, each runs until it waits.
    time_limit : float
        Seconds for each order.
    buffered_sends : bool
        Whether a send ends before its receive, as small sends of gloo do.
    latency_us, gbps : float
        Latency and rate of a rank's link: microseconds per message, 10^9 bits per second.
    trace : path, optional
        File for the timeline, for Perfetto.
    html : path, optional
        File for a page with report and timeline.
    own_modules : sequence of str
        Packages that every rank imports separately, as processes do; all other modules are shared,
        with their globals. `fn` must import them while it runs.
    cuda_as_cpu : bool, optional
        Whether the CPU does the work of CUDA: tensors, streams, events, devices. None: on a machine
        without a device, if a rank fails for lack of one.
    require : sequence of str
        Ids of invariants that must be decided for a proof, see `cpattn_proof.require`.
    """

    ranks: int = 8
    seeds: Sequence[int] = SEEDS
    time_limit: float = 60.0
    buffered_sends: bool = False
    latency_us: float = 10.0
    gbps: float = 100.0
    trace: str | os.PathLike[str] | None = None
    html: str | os.PathLike[str] | None = None
    own_modules: Sequence[str] = ()
    cuda_as_cpu: bool | None = None
    require: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_number("ranks", self.ranks, 1, 64, kind=int)
        if not isinstance(self.seeds, Sequence) or isinstance(self.seeds, str):
            raise TypeError(f"simulate: seeds must be a sequence of integers, got {self.seeds!r}")
        for seed in self.seeds:
            check_number("seeds", seed, 0, 2**31, kind=int)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"simulate: seeds must be distinct, got {list(self.seeds)}")
        check_number("time_limit", self.time_limit, 0.1, 86400)
        check_number("latency_us", self.latency_us, 0, 1e9)
        check_number("gbps", self.gbps, 1e-3, 1e6)
        if self.require:
            require(Report("simulate", ""), self.require)  # refuses unknown ids
        _check_own_modules(self.own_modules)
        if self.cuda_as_cpu is not None and not isinstance(self.cuda_as_cpu, bool):
            raise TypeError(
                f"simulate: cuda_as_cpu must be True, False or None, got {self.cuda_as_cpu!r}"
            )


def check_number(name: str, value: float, least: float, most: float, kind: type = float) -> None:
    """Raise TypeError or ValueError unless an option is a number within its bounds."""
    kinds, what = ((int,), "an integer") if kind is int else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"simulate: {name} must be {what}, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"simulate: {name} must be within {least:g} and {most:g}, got {value}")


def _check_own_modules(names: Sequence[str]) -> None:
    if isinstance(names, str):
        raise TypeError(f"simulate: own_modules must be a sequence of names, got {names!r}")
    for name in names:
        rule = None
        if name in _SHARED:
            rule = "not have what is there once"
        elif not (name.isidentifier() and _is_there(name)):
            rule = "be names of packages that can be imported"
        if rule:
            raise NotUsable(f"simulate: own_modules (--own-module) must {rule}, got {name!r}")


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # the module has no specification, so it cannot be imported again
        return False


class _Exited(NotUsable):
    """A rank has exited with a status."""


@dataclass
class Program:
    """Program that each rank runs, and its start values."""

    name: str
    body: Callable[[ProcessState], Any]
    argv: Sequence[str] = ()
    private: Sequence[Path] = ()
    output: Output = field(default_factory=Output)


def simulate(
    fn: Callable[..., Any],
    ranks: int = 8,
    *,
    args: Sequence[Any] = (),
    backend: str | None = "gloo",
    **options: Any,
) -> Report:
    """Run a function on all ranks at once, and report faults of their calls.

    Parameters
    ----------
    fn : callable
        Function that each rank runs; it gets its rank from `torch.distributed`, or from RANK in the
        environment.
    ranks : int
        Number of ranks, 1 to 64.
    args : sequence
        Arguments of `fn`, the same objects on all ranks.
    backend : str or None
        Backend of the group that exists when `fn` starts. None: `fn` calls ``init_process_group``.
    **options
        Attributes of `Options`: ``seeds``, ``time_limit``, ``buffered_sends``, ``latency_us``,
        ``gbps``, ``trace``, ``html``, ``own_modules``, ``cuda_as_cpu``, ``require``.

    Returns
    -------
    Report
        Findings are of SEQ, for calls that do not fit together, or of OWN, for rows without a
        receiver.

    Raises
    ------
    NotUsable
        If the program itself raises an error, never communicates, forks, or does not end.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> from cpattn_proof import simulate
    >>> def program():
    ...     dist.all_reduce(torch.ones(4))
    ...     if dist.get_rank() == 0:
    ...         dist.barrier()
    >>> report = simulate(program, ranks=2)
    >>> report.findings[0].kind
    'rank-returned'
    >>> simulate(lambda: dist.all_reduce(torch.ones(4)), ranks=2).proved
    True
    """
    if not callable(fn):
        raise TypeError(f"simulate: fn must be callable, got {type(fn).__name__}")

    def body(_: ProcessState) -> Any:
        if backend is not None:
            dist.init_process_group(backend)
        return fn(*args)

    name = getattr(fn, "__qualname__", type(fn).__name__)
    return judge(Program(name, body, sys.argv), Options(ranks, **options))


def simulate_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    quiet: bool = True,
    **options: Any,
) -> Report:
    """Run a script on all ranks, as `torchrun` would start it.

    Every rank has its own ``__main__``, and its own modules beside the script.

    Parameters
    ----------
    path : path
        Script to run.
    arguments : sequence of str
        Arguments of the script, the same on all ranks.
    quiet : bool
        Whether to hide the output of ranks. If False, each line begins with its rank.
    **options
        Attributes of `Options`, as in `simulate`.

    Returns
    -------
    Report
        See `simulate`.

    Raises
    ------
    NotUsable
        If the script is missing or no Python, or for a reason of `simulate`.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
    ...     _ = script.write("import torch.distributed as dist\\n"
    ...                      "dist.init_process_group('gloo')\\n"
    ...                      "dist.barrier()\\n")
    ...     script.flush()
    ...     simulate_script(script.name, ranks=2).verdict
    'proved'
    """
    script = Path(path)
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise NotUsable(f"simulate: {script}: {error}") from None
    folder = script.resolve().parent

    def body(state: ProcessState) -> Any:
        state.main.__dict__.update(__file__=str(script), __builtins__=__builtins__)
        exec(code, state.main.__dict__)
        return {
            name: value
            for name, value in vars(state.main).items()
            if isinstance(value, torch.Tensor)
        }

    program = Program(
        str(path), body, [str(path), *arguments], [folder], Output(quiet=quiet, prefix=True)
    )
    with _first_on_path(str(folder)):
        return judge(program, Options(**options))


@contextlib.contextmanager
def _first_on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def judge(program: Program, options: Options) -> Report:
    """Run a program in all orders, and report the faults."""
    if not _ALONE.acquire(blocking=False):
        raise RuntimeError("simulate: there is a simulation in this process already")
    try:
        return _judge_alone(program, options)
    finally:
        _ALONE.release()


def _judge_alone(program: Program, options: Options) -> Report:
    begin = time.perf_counter()
    findings: list[Finding] = []
    not_checked: dict[str, str] = {}
    traces: dict[int, comparison.Trace] = {}
    first: Run | None = None
    cuda = CudaAsCpu(options.cuda_as_cpu)
    for seed in options.seeds:
        run, traces[seed] = _run_once(program, options, seed, cuda, quiet=first is not None)
        if first is None:
            first = run
            if not run.findings:
                run.findings += run.expected.findings()
        findings += [_with_seed(one, seed, options) for one in run.findings]
        if findings:
            break
        if found := comparison.difference(traces[options.seeds[0]], traces[seed]):
            _, again = _run_once(program, options, options.seeds[0], cuda, quiet=True)
            if comparison.difference(traces[options.seeds[0]], again):
                not_checked["order of arrival"] = (
                    f"two runs in one order differ, first in {found[0].what} of rank "
                    f"{found[0].rank}"
                )
            else:
                seeds = (options.seeds[0], seed)
                findings.append(comparison.finding_of(found[1], seeds, options.ranks))
            break
    assert first is not None
    if not (first.expected.is_used or any(finding.invariant == "RES" for finding in findings)):
        not_checked = {"results": _RESULTS, **not_checked}
    if cuda.is_used:
        not_checked["CUDA"] = "its calls ran on the CPU; --no-cuda-as-cpu has them refused"
    if options.trace is not None:
        write_trace(first.link, options.trace)
    report = Report(
        "simulate",
        f"{program.name} on {options.ranks} ranks",
        tuple(findings),
        checked=_checked(first),
        not_checked=not_checked,
        seconds=time.perf_counter() - begin,
        facts={"seeds": list(traces), **counts_of(first)},
    )
    if options.require:
        report = require(report, options.require)
    if options.html is not None:
        write_page(report, first.link, options.html)
    return report


def _checked(run: Run) -> tuple[str, ...]:
    """Return the decided invariants: SEQ, OWN if calls cut rows for the ranks, and invariants of
    results that ranks hand over."""
    ids = {"SEQ", *(finding.invariant for finding in run.findings)}
    ids.update(run.expected.decided)
    if any(call.kind in CUTS_ROWS for calls in run.fabric.history for call in calls):
        ids.add("OWN")
    return tuple(id for id in ("SEQ", "OWN", "COV", "LSE", "RES") if id in ids)


def _with_seed(finding: Finding, seed: int, options: Options) -> Finding:
    """Return the finding with a way to reproduce it, if the first order did not show it."""
    if seed == options.seeds[0]:
        return finding
    replay = f"--seed {seed} replays it"
    return Finding(
        **{
            **{name: getattr(finding, name) for name in finding.__dataclass_fields__},
            "what": f"{finding.what} (in the order of seed {seed}; {replay})",
            "details": {**finding.details, "seed": seed},
        }
    )


def _run_once(
    program: Program, options: Options, seed: int, cuda: CudaAsCpu, *, quiet: bool
) -> tuple[Run, comparison.Trace]:
    """Run one order; if a rank lacks a device, run it again with the CPU as stand-in."""
    run, results = _run(program, options, seed, cuda, quiet=quiet)
    may_lack_a_device = not isinstance(run.failure, NotUsable) or isinstance(run.failure, _Exited)
    if may_lack_a_device and cuda.should_turn_on(run.failure):
        cuda.is_on = True
        again, other_results = _run(program, options, seed, cuda, quiet=quiet)
        if again.failure is None or again.num_calls >= run.num_calls:  # it is no worse
            run, results = again, other_results
    if run.failure is not None and not run.findings:
        found = assertions.finding_of(run.failure, run.rank_of_failure, run.text_of_failure)
        run.findings += filter(None, [found])
    _check_usable(run)
    return run, comparison.trace_of(run.fabric.history, results)


def _run(
    program: Program, options: Options, seed: int, cuda: CudaAsCpu, *, quiet: bool
) -> tuple[Run, list[Any]]:
    texts: dict[int, str] = {}
    link = Link(options.ranks, options.latency_us * 1e-6, options.gbps * 1e9 / 8)
    run = Run(options.ranks, seed, link, buffered_sends=options.buffered_sends)
    results: list[Any] = [None] * options.ranks
    before = Randomness()
    with (
        collecting(run.expected),
        installed(run, cuda.changes(run)),
        set_aside(options.own_modules),
        program.output.of(run, quiet=quiet),
    ):
        states = [
            ProcessState(
                _environment(rank, options.ranks),
                program.argv,
                program.private,
                options.own_modules,
            )
            for rank in range(options.ranks)
        ]

        def live(rank: int) -> None:
            try:
                with cuda.of_rank():
                    results[rank] = program.body(states[rank])
            except SystemExit as ending:
                if ending.code:
                    raise _Exited(f"simulate: rank {rank} exits with {ending.code}") from None
            except Exception as error:
                texts[rank] = _message_of(error)  # the time limit still applies here
                raise

        try:
            run.execute(live, states, options.time_limit)
        finally:
            before.apply()
    run.text_of_failure = texts.get(run.rank_of_failure, "")
    return run, results


def _environment(rank: int, size: int) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    return {**os.environ, **torchrun, **{name: str(value) for name, value in ranks.items()}}


def _check_usable(run: Run) -> None:
    """Raise the reason why a run cannot be judged, unless it has findings."""
    if run.findings:
        return
    if isinstance(run.failure, NotUsable):
        raise run.failure
    if run.failure is not None:
        rank, error = run.rank_of_failure, run.failure
        frame = _frame_of_program(error)
        raise NotUsable(
            f"simulate: rank {rank} raised {type(error).__name__}: {run.text_of_failure}{frame}"
        ) from error
    if not run.num_calls:
        raise NotUsable("simulate: no rank communicates: there is nothing to judge")


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"its text raises {type(another).__name__}"


def _frame_of_program(error: BaseException) -> str:
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    mine = [frame for frame in frames if is_program(frame.filename)]
    own = [frame for frame in mine if not frame.filename.startswith(PACKAGE)] or mine
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
