# SPDX-License-Identifier: Apache-2.0
"""Calls on the threads of torch's operators, for all engines that run on torch."""

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
    """Select the threads that help the calling threads, in the whole process.

    Between two operators torch's threads stay awake, on CPUs for which cpattn's threads would have
    to wait. Calls that alternate with operators, as in layers of a model, are therefore faster on
    torch's threads. A call then uses at most as many threads as torch's operators on the same
    calling thread, and waits for all, even if others need their CPUs. Results do not change.

    Parameters
    ----------
    pool : {"cpattn", "torch"}
        "cpattn": a pool that all calls of the process share, the default. "torch": the threads of
        OpenMP, with a team for each calling thread. A forked child returns to "cpattn", as OpenMP
        does not survive a fork.

    Raises
    ------
    TypeError, ValueError
        If `pool` is neither of the two.
    RuntimeError
        If this release of torch does not run on OpenMP.

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

    Torch has fewer threads in processes of torchrun, which sets OMP_NUM_THREADS to 1.
    """
    as_many = torch.get_num_threads() >= _core.default_num_threads()
    pool = os.environ.get(VARIABLE) or ("torch" if as_many else "cpattn")
    if pool not in THREAD_POOLS:
        raise ValueError(f"{VARIABLE} must be one of {THREAD_POOLS}, got {pool!r}")
    set_thread_pool(pool)


def follow_torch_threads() -> None:
    """Run calls of an engine on as many threads as torch has, unless ``CPATTN_NUM_THREADS`` is set.

    The threads are torch's own, or else run on the same CPUs.
    """
    if "CPATTN_NUM_THREADS" not in os.environ:
        _core.set_num_threads(torch.get_num_threads())
    use_torch_threads()
    if not _core.uses_openmp():
        _start_own()


def _start_own() -> None:
    """Start cpattn's threads from a new thread.

    vLLM has OpenMP bind each of torch's threads to a CPU, including the caller; threads that cpattn
    started from the caller would inherit that one CPU.
    """
    torch.ones(1 << 20).sum()  # now OpenMP has its threads
    cpus: set[int] = set()
    for thread_id in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            cpus |= os.sched_getaffinity(int(thread_id))
    starter = threading.Thread(target=_start_threads, args=(cpus,))
    starter.start()
    starter.join()


def _start_threads(cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)  # of this thread and the threads that it starts
    sequences = _core.default_num_threads()  # enough to give each thread a sequence
    q = np.zeros((64 * sequences, 1, 16), np.float32)
    cache = np.zeros((1, 64, 1, 16), np.float32)
    lens = [64] * sequences
    paged_attention(q, cache, cache, q_lens=lens, kv_lens=lens, block_tables=[[0]] * sequences)


def _gomp_parallel() -> int:
    """Return the address of the function that starts the OpenMP threads of torch's operators."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if "ATen parallel backend: OpenMP" in torch.__config__.parallel_info():
        # The loader's search order for torch: libraries loaded globally, as by LD_PRELOAD, come
        # before torch's own.
        for name in (None, str(library)):
            start = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
            if start is not None:
                return ctypes.cast(start, ctypes.c_void_p).value or 0
    raise RuntimeError(
        f"set_thread_pool: torch {torch.__version__} has no threads of OpenMP to run on"
    )
