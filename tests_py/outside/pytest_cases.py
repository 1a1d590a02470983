# SPDX-License-Identifier: Apache-2.0
"""Cases of other projects' pytest tests, called without pytest from the text of a module."""

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch

from outside.suite import Case, InexpressibleError, Sample


def stand_in(attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Install modules with these attributes, and their packages, so that imports find them."""
    for name, members in attributes.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            module = sys.modules.setdefault(path, ModuleType(path))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
        vars(sys.modules[name]).update(members)


def load(name: str, text: str, **names: Any) -> ModuleType:
    """Return a module from its text, in which `names` replace other objects."""
    module = ModuleType(name)
    vars(module).update(names)
    exec(compile(text, name, "exec"), vars(module))
    return module


def cases(
    module: ModuleType,
    tests: Mapping[str, Callable[..., None]],
    sample: Sample,
    keep: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> Iterator[Case]:
    """Yield the cases of tests by name, or a sample of each, which depends only on the seed.

    A test that would be skipped here has no cases; for other tests `keep` tells whether parameters
    are a case.
    """
    for name, test in tests.items():
        marks = getattr(getattr(module, name), "pytestmark", [])
        if any(mark.name == "skipif" and mark.args[0] for mark in marks):
            continue
        grid = [choices(*mark.args) for mark in marks if mark.name == "parametrize"]
        numbers: Sequence[int] = range(math.prod(map(len, grid)))
        if sample.size:  # draw more than needed, as some are no case
            chance = random.Random(f"{name}{sample.seed or ''}")
            numbers = chance.sample(numbers, min(len(numbers), 50 * sample.size))
        kept = filter(keep, (point(grid, number) for number in numbers))
        for parameters in islice(kept, sample.size):
            told = ", ".join(f"{key}={value}" for key, value in sorted(parameters.items()))
            yield Case(f"{name}({told})", partial(check, test, parameters))


def point(grid: Sequence[Sequence[dict[str, Any]]], number: int) -> dict[str, Any]:
    """Return the parameters with this number, as some grids are too large for a list."""
    parameters: dict[str, Any] = {}
    for axis in grid:
        number, index = divmod(number, len(axis))
        parameters |= axis[index]
    return parameters


def choices(names: str | Sequence[str], values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the arguments from `parametrize`, which may set several at once."""
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    made = type(pytest.param())
    rows = [
        value.values if isinstance(value, made) else value if len(keys) > 1 else [value]
        for value in values
    ]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def check(test: Callable[..., None], parameters: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    try:
        test(**parameters)
    except pytest.skip.Exception as skipped:
        raise InexpressibleError("skipped by the test") from skipped
    finally:
        torch.set_default_dtype(before)  # tests change it
