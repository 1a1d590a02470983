# SPDX-License-Identifier: Apache-2.0
"""Bugs of real engines and libraries, rebuilt small, that the tools of this package refute.

    cpattn zoo

``entry`` says what a bug here is, ``registry`` finds them: a module in ``lint``, ``simulate`` or
``conform`` has a list ``ENTRIES``, and needs no line elsewhere.
"""

from .entry import TOOLS, Outcome, ZooEntry, visit
from .registry import all_entries

__all__ = ["TOOLS", "Outcome", "ZooEntry", "all_entries", "visit"]
