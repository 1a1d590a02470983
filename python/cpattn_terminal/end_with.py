# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them; on Linux alone."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel end this process with the one that started it, whatever it is waiting for.

    Ranks that meet would wait for each other until a timeout, and keep their host as long.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)
