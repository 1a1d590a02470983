# SPDX-License-Identifier: Apache-2.0
"""Key-value store through which processes find each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store


class Turns(Protocol):
    """Interface of the ranks' turns, one rank at a time."""

    def block(self, ready: Callable[[], bool], what: str = ...) -> None: ...
    def give_way(self) -> None: ...


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class SimulatedStore(Store):
    """One dictionary for all ranks; asking for a missing key lets other ranks run.

    Parameters
    ----------
    turns : Turns
        Lets other ranks run.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._turns = turns

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        known = self._values.get(key)
        if known == _bytes(expected) or (known is None and not expected):
            self._values[key] = _bytes(desired)
        return self._values.get(key, _bytes(expected))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        names = ", ".join(keys)
        self._turns.block(
            lambda: all(key in self._values for key in keys), f"the key {names} of the store"
        )

    def check(self, keys: list[str]) -> bool:
        self._turns.give_way()
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def append(self, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, b"") + _bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: waits end when no rank can go on."""
