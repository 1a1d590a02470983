# SPDX-License-Identifier: Apache-2.0
"""The threads of cpattn where those of torch are."""

from __future__ import annotations

import contextlib
import os
import threading

import numpy as np
import torch

from ... import _core
from ...attention import paged_attention


def follow_torch_threads() -> None:
    """Use as many threads as torch does, unless ``CPATTN_NUM_THREADS`` says how many, on its CPUs.

    vLLM has OpenMP bind each of torch's threads to a CPU, the caller's too. Threads that cpattn
    starts from the caller would inherit that one CPU, so they are started from another thread.
    """
    if "CPATTN_NUM_THREADS" not in os.environ:
        _core.set_num_threads(torch.get_num_threads())
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
