# SPDX-License-Identifier: Apache-2.0
"""Peak memory of this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def forget_peak() -> None:
    """Restart `peak_resident_bytes` from the present memory."""
    with suppress(OSError):  # some containers do not allow it; the peak is then the whole process's
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Return the peak memory of this process (VmHWM, which exec resets and ru_maxrss keeps)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
