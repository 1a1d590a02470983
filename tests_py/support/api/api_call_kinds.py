# SPDX-License-Identifier: Apache-2.0
"""A good call, and the function that it is a call of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = dict[str, tuple[str, Any]]  # by name: (kind, value), the kinds of `argument_kinds`


@dataclass
class Good:
    """A call that succeeds."""

    function: Callable[..., Any]
    arguments: Arguments
    close: Callable[[], None] = lambda: None
    # Errors other than TypeError, ValueError and MemoryError that its documentation has.
    errors: tuple[type[Exception], ...] = ()
    # What its messages may say instead of an argument's name.
    names: tuple[str, ...] = ()
    # What they may begin with instead of its name.
    prefixes: tuple[str, ...] = ()


@dataclass
class Target:
    """A public callable; `name` is what its errors begin with."""

    name: str
    make: Callable[[], Good]
    judged: bool = True  # whether results for ordinary numbers are ordinary
