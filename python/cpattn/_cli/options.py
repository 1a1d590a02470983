# SPDX-License-Identifier: Apache-2.0
"""Values of options: each says its rule and what it got, and refuses what no machine could do."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from .._limits import MAX_INT, MAX_RANKS


class _Bounded(click.ParamType):  # type: ignore[type-arg]
    """A value of one type from `low` to `high`; `rule` says so."""

    def __init__(self, kind: type, low: float, high: float, rule: str) -> None:
        self._kind, self._low, self._high, self._rule = kind, low, high, rule

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = _parsed(self._kind, value)
        if number is None or not self._low <= number <= self._high:
            self.fail(f"{self._rule}, got {_shown(value)}", param, ctx)
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
    """Integers from 0, with commas between them."""

    name = "N,N,..."

    def __init__(self, high: int = MAX_INT) -> None:
        self._high = high

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        if isinstance(value, list):
            return value
        numbers = []
        for item in value.split(","):
            number = _parsed(int, item)
            if number is None or not 0 <= number <= self._high:
                rule = f"must be a comma-separated list of integers from 0 to {self._high}"
                where = f" in {_shown(value)}" if item != value else ""
                self.fail(f"{rule}, got {_shown(item)}{where}", param, ctx)
            numbers.append(number)
        return numbers


class CpSizes(click.ParamType):  # type: ignore[type-arg]
    """Numbers of ranks, see `parse_cp_sizes`."""

    name = "N | N,N,... | N..N"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        from ..cost_model.command import parse_cp_sizes

        if isinstance(value, list):
            return value
        try:
            sizes = parse_cp_sizes(value)
        except ValueError:
            sizes = [0]
        if not 1 <= min(sizes) <= max(sizes) <= MAX_RANKS:
            rule = (
                f"must be a number of ranks from 1 to {MAX_RANKS}, a list like 8,16,48 or a range"
            )
            self.fail(f"{rule} like 8..1024, got {_shown(value)}", param, ctx)
        return sizes


class MeshShape(click.ParamType):  # type: ignore[type-arg]
    """Ranks in two dimensions: rows on a ring, and ranks of a row."""

    name = "RINGxHEADS"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        ring, _, heads = value.partition("x")
        sizes = _parsed(int, ring) or 0, _parsed(int, heads) or 0
        if min(sizes) < 1 or sizes[0] * sizes[1] > MAX_RANKS:
            rule = f"must be two numbers whose product is 1 to {MAX_RANKS} ranks, as 4x2"
            self.fail(f"{rule}, got {_shown(value)}", param, ctx)
        return sizes


class PoolPlacement(click.ParamType):  # type: ignore[type-arg]
    """Name of a placement of keys in the pools of ranks, see `cpattn.replay.shards`."""

    name = "placement"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from ..replay.shards import MAX_INTERLEAVE, PlacementName

        if PlacementName.parse(value) is None:
            rule = (
                "must be 'replicated', 'page_interleave' or 'token_interleave', the last with or "
                f"without ':I' for I tokens in a row, 1 to {MAX_INTERLEAVE}"
            )
            self.fail(f"{rule}, got {_shown(value)}", param, ctx)
        return value


class Requirements(click.ParamType):  # type: ignore[type-arg]
    """Ids of invariants that a tool has to decide, see `cpattn.proof.require`."""

    name = "ID,ID,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from ..proof import INVARIANTS

        if isinstance(value, str):
            value = tuple(value.split(","))
        unknown = next((one for one in value if one not in INVARIANTS), None)
        if unknown is not None:
            self.fail(f"must be of {', '.join(INVARIANTS)}, got {_shown(unknown)}", param, ctx)
        return value


#: The same option of every command that judges; its value is a tuple, empty if not given.
require_option = click.option(
    "--require",
    "required",
    type=Requirements(),
    default=(),
    help="Invariants that have to be checked, as COV,LSE: exit code 2 where one is not.",
)


class OutputPath(click.Path):
    """A file to write; that it cannot be is said before the run."""

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
            self.fail(f"{_shown(str(path))}: {error.strerror}", param, ctx)
        return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line that a file could not be written after all."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"writing {path}: {error.strerror or error}") from None


def _parsed(kind: type, text: Any) -> Any:
    """The number that a text stands for; None if it is none, or not finite."""
    try:
        number = kind(text)
    except ValueError:
        return None
    return number if kind is int or math.isfinite(number) else None


def _shown(value: Any) -> str:
    """A value in an error message, which is to stay one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(str(value))} characters)"
