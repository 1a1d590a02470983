# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C during a call."""

from __future__ import annotations

import signal
import subprocess
import sys
import time


def assert_interruptible(script: str) -> None:
    """The script prints "ready" and makes a call of many seconds, which SIGINT ends within one."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # into the computation
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
        assert "KeyboardInterrupt" in stderr
        assert time.monotonic() - start < 1
    finally:
        process.kill()
        process.wait()
