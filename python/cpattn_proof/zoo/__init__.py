# SPDX-License-Identifier: Apache-2.0
"""Small rebuilds of bugs of engines and libraries, which the tools of this package refute.

    cpattn zoo

``entry`` describes a bug, ``registry`` finds them: each module in ``lint``, ``simulate`` or
``conform`` has a list ``ENTRIES``, and needs no other registration.
"""

from .entry import TOOLS, Outcome, ZooEntry, visit
from .registry import all_entries

__all__ = ["TOOLS", "Outcome", "ZooEntry", "all_entries", "visit"]
