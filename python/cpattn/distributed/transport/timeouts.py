# SPDX-License-Identifier: Apache-2.0
"""Times, in seconds, that ranks wait for each other."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

FIRST_MEETING = 10.0
"""Longest wait for the ranks of a host to meet for the first time, for which all are ready."""
BEHIND_TIMEOUT = 0.5
"""Time behind the timeout of the group in which ranks tell each other whom they missed."""
LAST_WORDS = 0.05
"""Time for last words to arrive where they are awaited, before connections close."""
LAST_WORDS_OF_THE_WAITING = 0.3
"""Time for last words of a rank that may be waiting itself, for somebody else."""
EXIT = 2.0
"""Time that the end of the interpreter gives to threads that wait in a backend: one that came out
of it while the interpreter ends would take the process down with an abort."""


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return how long the group waits for an answer."""
    timeout = dist.default_pg_timeout
    with contextlib.suppress(AttributeError, RuntimeError):  # a backend without options
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()
