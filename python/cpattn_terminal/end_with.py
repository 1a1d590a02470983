# SPDX-License-Identifier: Apache-2.0
"""Processes that end with their parent; on Linux only."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Make the kernel end this process together with its parent, even during a wait.

    Otherwise, ranks in a meeting would wait for each other until a timeout, and block their host.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os.kill(os.getpid(), signal.SIGKILL)
