# SPDX-License-Identifier: Apache-2.0
"""The memory that this process has held."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def forget_peak() -> None:
    """Let `peak_resident_bytes` start again from what is held now."""
    with suppress(OSError):  # some containers do not allow it; the peak is then the whole process's
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The most memory this process has held (VmHWM, which exec resets and ru_maxrss keeps)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
