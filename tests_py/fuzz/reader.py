# SPDX-License-Identifier: Apache-2.0
"""Reader of values from the bytes of a fuzzer, like tests_cpp/fuzz/reader.h in C++."""

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

BORDERS = (0, 2**15, 2**20, 2**31 - 1, -(2**31), 2**32 - 1, 2**40, 2**63 - 1, -(2**63), 2**64 - 1)


def check_refusal(error: Exception, begin: str) -> None:
    if not str(error).startswith(begin):
        raise AssertionError(f"a message should begin with {begin!r}") from error


class Reader:
    """Reads bytes in their order, then zeros."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.next = 0

    def take(self, size: int) -> bytes:
        """Return at most so many bytes unchanged."""
        part = self.data[self.next : self.next + size]
        self.next += size
        return part

    def bits(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def between(self, low: int, high: int) -> int:
        width = high - low + 1
        return low + self.bits(1 if width <= 256 else 2 if width <= 65536 else 8) % width

    def flag(self) -> bool:
        return self.bits(1) & 1 == 1

    def rarely(self, chances: int = 32) -> bool:
        """Return True once in `chances` calls, and False after the last byte."""
        return self.bits(1) > 255 - 256 // chances

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.between(0, len(values) - 1)]

    def any(self) -> int:
        """Return any integer, often one near a border."""
        if self.flag():
            return self.bits(8) - 2**63
        return self.one_of(BORDERS) + self.between(0, 4) - 2

    def mostly(self, value: Any, chances: int = 64) -> Any:
        """Return mostly the value; else its neighbour, any integer, or no integer."""
        if not self.rarely(chances):
            return value
        other = (None, True, 1.5, "1", b"1", [], (1, 2), {}, float("nan"), 10**30)
        choice = self.between(0, 3)
        if choice == 0:
            return self.one_of(other)
        if choice == 1 and isinstance(value, int):
            return value + (1 if self.flag() else -1)
        return self.any()
