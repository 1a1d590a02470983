# SPDX-License-Identifier: Apache-2.0
"""Patches of torch and Python, in place while one process holds all ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from ...findings import NotUsable
from ..calls import Group
from ..process_group import SimulatedGroup
from ..run import Run
from ..store import SimulatedStore
from . import torch_names

#: `os`, and the module that it takes its functions from.
_SYSTEM = [os, *(sys.modules[name] for name in ("posix", "nt") if sys.modules.get(name))]


@contextlib.contextmanager
def installed(run: Run, others: Iterable[tuple[Any, str, Any]] = ()) -> Iterator[None]:
    """Simulate every group that a program makes, with any backend, within the block.

    Parameters
    ----------
    run : Run
        Carries out the calls of groups.
    others : iterable of (owner, name, value)
        Further replacements within the block.
    """
    changes: list[tuple[Any, str, Any]] = [
        (c10d, "_new_process_group_helper", _group_maker(run)),
        (c10d, "rendezvous", _rendezvous(run)),
        # Torch's own function warns of each backend that torch was built without.
        (c10d, "_get_default_timeout", lambda backend: default_pg_timeout),
        (c10d, "_store_based_barrier", _store_barrier(run)),
        (BaseProcess, "start", _refusal(run, "starts processes", BaseProcess.start)),
        *_ends_of_processes(run),
        *_signals(run),
        *_one_profiler(run),
        *others,
    ]
    for name in ("TCPStore", "FileStore", "HashStore"):
        for module in (dist, c10d, sys.modules["torch.distributed.rendezvous"]):
            if hasattr(module, name):
                changes.append((module, name, _store_maker(run, name)))
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        torch_names.isolate_threads(True)  # ranks register groups with equal names
        stack.callback(torch_names.isolate_threads, False)
        yield


def _group_maker(run: Run) -> Callable[..., Any]:
    generations = [0] * run.size

    def make(
        group_size: int,
        group_rank: int,
        global_ranks_in_group: list[int],
        backend: str,
        store: Any,
        group_name: str,
        backend_options: Any = None,
        timeout: Any = None,
        pg_tag: str | None = None,
        device_id: Any = None,
        group_desc: str | None = None,
        **_: Any,  # further options of some releases, all for backends
    ) -> Any:
        if group_name in c10d._world.pg_names.values():
            raise ValueError(f"new_group: there is a group {group_name} already")
        if pg_tag:
            known = c10d._find_pg_by_ranks_and_tag(pg_tag, global_ranks_in_group)
            if known:
                return known, c10d._world.pg_map[known][1]
        ranks = tuple(global_ranks_in_group or range(run.size))
        if not global_ranks_in_group and group_size not in (-1, run.size):
            raise ValueError(
                f"init_process_group: world_size must be {run.size}, the ranks that are simulated, "
                f"got {group_size}"
            )
        if run.rank not in ranks:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        if not c10d._world.pg_names:  # no group is left, so torch counts from 0 again
            generations[run.rank] += 1
        group = SimulatedGroup(
            Group(str(group_name), ranks, generations[run.rank]),
            ranks.index(run.rank),
            str(backend),
            run,
        )
        torch_names.register(
            group,
            str(group_name),
            backend=backend,
            backend_config=str(c10d.BackendConfig(c10d.Backend(backend))),
            store=store,
            tag=pg_tag,
        )
        group.meet()
        return group, store

    return make


def _rendezvous(run: Run) -> Callable[..., Any]:
    def meet(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        if rank not in (-1, run.rank):
            raise ValueError(
                f"init_process_group: rank must be {run.rank}, that of the process, got {rank}"
            )
        yield run.store_of("rendezvous"), run.rank, run.size

    return meet


def _store_barrier(run: Run) -> Callable[..., None]:
    def meet(rank: int, store: Any, group_name: str, count: int, *_: Any, **__: Any) -> None:
        arrived = run.store_of(("barrier", str(group_name)))
        arrived.set(str(run.rank), b"")
        run.block(lambda: arrived.num_keys() >= count, f"{count} ranks at the store")

    return meet


def _store_maker(run: Run, kind: str) -> Callable[..., SimulatedStore]:
    def make(*arguments: Any, **options: Any) -> SimulatedStore:
        if kind == "HashStore":  # other ranks cannot find it
            return run.store_of(object())
        names = ("host_name", "port") if kind == "TCPStore" else ("file_name",)
        given = dict(zip(names, arguments, strict=False)) | options
        return run.store_of((kind, *(given.get(name) for name in names)))

    return make


def _signals(run: Run) -> list[tuple[Any, str, Any]]:
    """Keep signals and timers from ranks: Python lets only the main thread handle signals."""
    chosen: dict[tuple[int, int], Any] = {}
    choose, ask = signal.signal, signal.getsignal

    def handle(number: int, handler: Any) -> Any:
        if not run.is_rank():
            return choose(number, handler)
        before = handler_of(number)
        chosen[run.rank, number] = handler
        return before

    def handler_of(number: int) -> Any:
        default = ask(number)  # ValueError if there is no such signal
        return chosen.get((run.rank, number), default) if run.is_rank() else default

    def kept_from_ranks(original: Callable[..., Any], instead: Any) -> Callable[..., Any]:
        def start(*arguments: Any) -> Any:
            return instead if run.is_rank() else original(*arguments)

        return start

    def kill(process: int, number: int) -> None:
        own_group = -os.getpgrp() if hasattr(os, "getpgrp") else 0
        if number and process in (0, os.getpid(), own_group):
            sends(process, number)
        end(process, number)

    what = "sends itself a signal"
    end, sends = os.kill, _refusal(run, what, lambda *_: None)
    refuse = partial(_refusal, run, what)
    return [
        (signal, "signal", handle),
        (signal, "getsignal", handler_of),
        *_changed((signal,), "alarm", lambda own: kept_from_ranks(own, 0)),
        *_changed((signal,), "setitimer", lambda own: kept_from_ranks(own, (0.0, 0.0))),
        *_changed((signal,), "raise_signal", refuse),
        *_changed((signal,), "pthread_kill", refuse),
        *_changed(_SYSTEM, "killpg", refuse),
        *_changed(_SYSTEM, "kill", lambda own: kill),
    ]


def _changed(
    owners: Iterable[Any], name: str, change: Callable[[Any], Any]
) -> list[tuple[Any, str, Any]]:
    """Return a change of a function in those modules that have it on this system."""
    return [(owner, name, change(getattr(owner, name))) for owner in owners if hasattr(owner, name)]


def _one_profiler(run: Run) -> list[tuple[Any, str, Any]]:
    """Refuse a second profiling rank: if two threads profile at a time, torch ends the process."""
    owners: list[int] = []
    profiler: Any = torch.autograd.profiler

    def held(original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*arguments: Any, **options: Any) -> Any:
            if run.is_rank():
                if owners and owners != [run.rank]:
                    run.fail(
                        NotUsable(
                            f"simulate: rank {run.rank} profiles while rank {owners[0]} does; "
                            "torch has one profiler in a process: profile on one rank"
                        )
                    )
                owners[:] = [run.rank]
            return original(*arguments, **options)

        return begin

    def end() -> Any:
        owners.clear()
        return disable()

    disable = profiler._disable_profiler
    return [
        (profiler, "_prepare_profiler", held(profiler._prepare_profiler)),
        (profiler, "_enable_profiler", held(profiler._enable_profiler)),
        (profiler, "_disable_profiler", end),
    ]


def _exit_of_ranks(run: Run) -> Callable[[int], Any]:
    """Return `os._exit` that ends only the calling rank, as the process has the others."""
    outside, leave = threading.current_thread(), os._exit

    def end(status: int) -> Any:
        if run.is_rank():
            raise SystemExit(status)
        if threading.current_thread() is outside:
            leave(status)
        run.fail(
            NotUsable(
                f"simulate: rank {run.rank} ends its process by os._exit({status}) in a thread of "
                "its own; ranks can end themselves alone"
            )
        )

    return end


def _ends_of_processes(run: Run) -> list[tuple[Any, str, Any]]:
    """Replace functions that copy or end the process of all ranks."""
    leave = _exit_of_ranks(run)
    changes = _changed(_SYSTEM, "_exit", lambda own: leave)
    kinds = {
        "aborts": ("abort",),
        "forks": ("fork", "forkpty"),
        "replaces its process by another program": ("execv", "execve"),
    }
    for what, names in kinds.items():
        for name in names:
            changes += _changed(_SYSTEM, name, partial(_refusal, run, what))
    return changes


def _refusal(run: Run, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        if run.is_rank():
            reason = "all ranks are simulated in one process: give what each of them runs"
            run.fail(NotUsable(f"simulate: rank {run.rank} {what}; {reason}"))
        return original(*arguments, **options)

    return refuse
