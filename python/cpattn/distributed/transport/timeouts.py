# SPDX-License-Identifier: Apache-2.0
"""Times, in seconds, that ranks wait for each other."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

FIRST_MEETING = 10.0
"""Longest wait for the first meeting of a host's ranks, when all are ready."""
BEHIND_TIMEOUT = 0.5
"""Time after the group's timeout in which ranks tell each other which rank they missed."""
LAST_WORDS = 0.05
"""Time for last messages to arrive before connections close."""
LAST_WORDS_OF_THE_WAITING = 0.3
"""Time for the last message of a rank that may itself be waiting for another rank."""
EXIT = 2.0
"""Time at interpreter exit for threads in a backend: a thread that returned from there during
exit would abort the process."""


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the time that the group waits for an answer."""
    timeout = dist.default_pg_timeout
    with contextlib.suppress(AttributeError, RuntimeError):  # a backend without options
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()
