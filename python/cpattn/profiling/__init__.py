# SPDX-License-Identifier: Apache-2.0
"""Profiler: tells where the time of a piece of code goes.

    with cpattn.profile() as trace:
        out = cpattn.paged_attention(...)
    trace.summary(), trace.plot("timeline.png"), trace.save("trace.json")

``recording`` takes events from the core, and selects some; ``profiler`` sums them up;
``timeline`` draws them, with matplotlib, and ``chrome_trace`` writes them for Perfetto. Imports
NumPy and the core, and matplotlib or rich when a figure or a table is asked for.
"""

from .._core import TraceScope
from .profiler import Profile, ScopeTime, profile
from .recording import MAX_EVENTS, Thread

__all__ = ["MAX_EVENTS", "Profile", "ScopeTime", "Thread", "TraceScope", "profile"]
