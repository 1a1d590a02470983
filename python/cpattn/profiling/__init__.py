# SPDX-License-Identifier: Apache-2.0
"""Profiler that measures the time of each part of a with block.

    with cpattn.profile() as trace:
        out = cpattn.paged_attention(...)
    trace.summary(), trace.plot("timeline.png"), trace.save("trace.json")

``recording`` takes events from the core and selects them; ``profiler`` sums them up; ``timeline``
draws them with matplotlib, and ``chrome_trace`` writes them for Perfetto. Imports NumPy and the
core, and matplotlib or rich only for a figure or a table.
"""

from .._core import TraceScope
from .profiler import Profile, ScopeTime, profile
from .recording import MAX_EVENTS, Thread

__all__ = ["MAX_EVENTS", "Profile", "ScopeTime", "Thread", "TraceScope", "profile"]
