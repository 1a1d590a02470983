# SPDX-License-Identifier: Apache-2.0
"""Values of options, which state their rule and the value, and refuse impossible numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .limits import MAX_INT


class _Bounded(click.ParamType):  # type: ignore[type-arg]
    """Value of one type from `low` to `high`, with the text of this rule."""

    def __init__(self, kind: type, low: float, high: float, rule: str) -> None:
        self._kind, self._low, self._high, self._rule = kind, low, high, rule

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = parsed(self._kind, value)
        if number is None or not self._low <= number <= self._high:
            self.fail(f"{self._rule}, got {shown(value)}", param, ctx)
        return number


class Integer(_Bounded):
    """An integer from `low` to `high`."""

    name = "integer"

    def __init__(self, low: int = 1, high: int = MAX_INT) -> None:
        super().__init__(int, low, high, f"must be an integer from {low} to {high}")


class Number(_Bounded):
    """A finite number from `low` to `high`."""

    name = "number"

    def __init__(self, low: float, high: float) -> None:
        super().__init__(float, low, high, f"must be a number from {low:g} to {high:g}")


class IntegerList(click.ParamType):  # type: ignore[type-arg]
    """Integers from 0, separated by commas."""

    name = "N,N,..."

    def __init__(self, high: int = MAX_INT) -> None:
        self._high = high

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        numbers = []
        for item in value.split(","):
            number = parsed(int, item)
            if number is None or not 0 <= number <= self._high:
                rule = f"must be a comma-separated list of integers from 0 to {self._high}"
                where = f" in {shown(value)}" if item != value else ""
                self.fail(f"{rule}, got {shown(item)}{where}", param, ctx)
            numbers.append(number)
        return numbers


class PoolPlacement(click.ParamType):  # type: ignore[type-arg]
    """Placement of keys in the pools of ranks, by its name in `cpattn`."""

    name = "placement"
    _most = 1 << 16

    def get_metavar(self, param: Any, ctx: Any) -> str:
        return "[replicated|page_interleave|token_interleave[:I]]"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        known = r"replicated|page_interleave|token_interleave(?::(\d{1,9}))?"
        match = re.fullmatch(known, value, re.ASCII)
        if match is None or not 1 <= int(match[1] or 1) <= self._most:
            rule = (
                "must be 'replicated', 'page_interleave' or 'token_interleave', the last with or "
                f"without ':I' for I tokens in a row, 1 to {self._most}"
            )
            self.fail(f"{rule}, got {shown(value)}", param, ctx)
        return value


class OutputPath(click.Path):
    """File to write, checked before the run."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not str(value):
            self.fail("must be the name of a file, got ''", param, ctx)
        path = Path(str(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not folder.is_dir():
            self.fail(f"Directory {str(path.parent)!r} does not exist.", param, ctx)
        try:
            path.stat()
        except FileNotFoundError:
            if not os.access(folder, os.W_OK):
                self.fail(f"Directory {str(path.parent)!r} is not writable.", param, ctx)
        except OSError as error:
            self.fail(f"{shown(str(path))}: {error.strerror}", param, ctx)
        return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report in one line that a file could not be written after all."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"writing {path}: {error.strerror or error}") from None


def parsed(kind: type, text: Any) -> Any:
    """Return the number of a text; None if it is no number, or not finite."""
    try:
        number = kind(text)
    except ValueError:
        return None
    return number if kind is int or math.isfinite(number) else None


def shown(value: Any) -> str:
    """Show a value in an error message of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(str(value))} characters)"
