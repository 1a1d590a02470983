# SPDX-License-Identifier: Apache-2.0
"""A mutant may want all the memory there is: it is then the first that the system ends."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


def limit_memory() -> None:
    """Of this process and those it starts. Tests reserve more than there is, so no less is set."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
