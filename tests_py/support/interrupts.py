# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C during a call."""

import signal
import sys
import time
from contextlib import closing

from support.children import Children
from support.time_limits import BUSY, PATIENCE


def assert_interruptible(script: str) -> None:
    """The script prints "ready" and makes a call of many seconds, which SIGINT ends within one, or
    a few where a sanitizer runs on a busy machine."""
    with closing(Children()) as children:
        process = children.start([sys.executable, "-c", script])
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # into the computation
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert "KeyboardInterrupt" in stderr
        assert time.monotonic() - start < 1 + 4 * BUSY
