# SPDX-License-Identifier: Apache-2.0
"""Calls on the threads of torch's operators, for all integrations of engines that run on torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from .. import _core
from ..attention import paged_attention

ThreadPool = Literal["cpattn", "torch"]
THREAD_POOLS: tuple[ThreadPool, ...] = get_args(ThreadPool)
VARIABLE = "CPATTN_THREAD_POOL"


def set_thread_pool(pool: ThreadPool) -> None:
    """Say whose threads compute besides those that call, in the whole process.

    Between two operators of torch its threads are awake, on the CPUs that cpattn's would have to
    wait for: calls that take turns with operators, as in the layers of a model, are faster on
    them. A call then has at most as many threads as operators of torch have on the same thread,
    and waits for all of them, also where others want their CPUs. Results do not depend on it.

    Parameters
    ----------
    pool : {"cpattn", "torch"}
        "cpattn": a pool that all calls of the process share, the default. "torch": the threads of
        OpenMP, of which each thread that calls has a team of its own. A forked child has "cpattn"
        again, as OpenMP does not survive a fork.

    Raises
    ------
    TypeError, ValueError
        For what is neither of the two.
    RuntimeError
        This release of torch does not run on OpenMP.

    Examples
    --------
    >>> from cpattn.integrations.torch_threads import set_thread_pool
    >>> set_thread_pool("cpattn")
    """
    function, argument = "set_thread_pool", "pool"
    if _core.text(pool, function, argument) not in THREAD_POOLS:
        raise ValueError(f"{function}: {argument} must be one of {THREAD_POOLS}, got {pool!r}")
    _core.set_openmp(_gomp_parallel() if pool == "torch" else 0)


def use_torch_threads() -> None:
    """Run calls on torch's threads if these are as many, or on those that the environment names.

    They are fewer where torchrun started the process: it sets OMP_NUM_THREADS to 1.
    """
    as_many = torch.get_num_threads() >= _core.default_num_threads()
    pool = os.environ.get(VARIABLE) or ("torch" if as_many else "cpattn")
    if pool not in THREAD_POOLS:
        raise ValueError(f"{VARIABLE} must be one of {THREAD_POOLS}, got {pool!r}")
    set_thread_pool(pool)


def follow_torch_threads() -> None:
    """Run calls of an engine on as many threads as torch has, unless ``CPATTN_NUM_THREADS`` is set.

    They are torch's own, or else on the same CPUs.
    """
    if "CPATTN_NUM_THREADS" not in os.environ:
        _core.set_num_threads(torch.get_num_threads())
    use_torch_threads()
    if not _core.uses_openmp():
        _start_own()


def _start_own() -> None:
    """vLLM has OpenMP bind each of torch's threads to a CPU, the caller's too.

    Threads that cpattn starts from the caller would inherit that one CPU, so they are started from
    another thread.
    """
    torch.ones(1 << 20).sum()  # now OpenMP has its threads
    cpus: set[int] = set()
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            cpus |= os.sched_getaffinity(int(thread_id))
    starter = threading.Thread(target=_start_threads, args=(cpus,))
    starter.start()
    starter.join()


def _start_threads(cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)  # of this thread, and of those that it starts
    sequences = _core.default_num_threads()  # long enough for each to be given a thread
    q = np.zeros((64 * sequences, 1, 16), np.float32)
    cache = np.zeros((1, 64, 1, 16), np.float32)
    lens = [64] * sequences
    paged_attention(q, cache, cache, q_lens=lens, kv_lens=lens, block_tables=[[0]] * sequences)


def _gomp_parallel() -> int:
    """The address of what starts the threads of OpenMP that torch's operators run on."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if "ATen parallel backend: OpenMP" in torch.__config__.parallel_info():
        # The order in which the loader looked for torch's own: what was loaded for all, as by
        # LD_PRELOAD, comes before what torch brings.
        for name in (None, str(library)):
            start = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
            if start is not None:
                return ctypes.cast(start, ctypes.c_void_p).value or 0
    raise RuntimeError(
        f"set_thread_pool: torch {torch.__version__} has no threads of OpenMP to run on"
    )
