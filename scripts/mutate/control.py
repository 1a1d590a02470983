# SPDX-License-Identifier: Apache-2.0
"""The memory by which the tool tells the processes of a test which mutant is active.

See mutants.h. Python code has it as the module cpattn_mutants.
"""

from __future__ import annotations

import mmap
from pathlib import Path

VARIABLE = "CPATTN_MUTANTS"
CAPACITY = 1 << 16
_HEADER = 4

MODULE = f'''\
"""Which mutant is active, and which were reached; see scripts/mutate/mutants.h."""

import mmap
import os

_path = os.environ.get("{VARIABLE}")
if _path:
    with open(_path, "r+b") as file:
        _memory = memoryview(mmap.mmap(file.fileno(), 0))
else:
    _memory = memoryview(bytearray({_HEADER + CAPACITY}))
_active = _memory[:{_HEADER}].cast("i")
_reached = _memory[{_HEADER}:]


def mutant(number):
    _reached[number] = 1
    return _active[0] == number
'''


class Control:
    """The tool's side of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(_HEADER + CAPACITY))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def activate(self, number: int) -> None:
        """From now on that mutant is active, or none for 0; none has been reached."""
        self._memory[:_HEADER] = number.to_bytes(_HEADER, "little")
        self._memory[_HEADER:] = bytes(CAPACITY)

    def reached(self) -> list[int]:
        flags = self._memory[_HEADER:]
        found, at = [], flags.find(1)
        while at >= 0:
            found.append(at)
            at = flags.find(1, at + 1)
        return found
