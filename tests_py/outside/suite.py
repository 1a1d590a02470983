# SPDX-License-Identifier: Apache-2.0
"""Suite of another project: its needs, its cases, its results, and the expected ones."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from audit import machine
from cpattn import _core, active_isa, supported_isas
from outside import archive
from outside.archive import EXPECTED
from support.places import ROOT


class InexpressibleError(Exception):
    """Error that says why cpattn has no call for a case."""


class Case(NamedTuple):
    """Case whose `check` returns unchecked outputs, or raises AssertionError for a wrong result."""

    name: str
    check: Callable[[], str | None]


class Sample(NamedTuple):
    """Number of cases of each test, None for all, and the seed that chooses them."""

    size: int | None = 4
    seed: int = 0


COUNTED = Sample()


@dataclass
class Result:
    """Cases of a suite by outcome; reasons are counted, and failures have names."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    not_expressible: Counter[str] = field(default_factory=Counter)
    not_compared: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        """Return the suite's entry in `expected.toml` without its origin."""
        return {
            "passed": self.passed,
            "failed": len(self.failed),
            "not_expressible": dict(self.not_expressible),
            "not_compared": dict(self.not_compared),
        }


def read_expected() -> dict[str, dict[str, Any]]:
    empty: dict[str, Any] = {"not_expressible": {}, "not_compared": {}}
    return {name: empty | found for name, found in archive.entries().items()}


def missing(entry: dict[str, Any]) -> list[str]:
    """Return why a suite cannot run here: missing packages, or an archive to fetch."""
    absent = [needed for needed in entry["needs"] if not machine.has_release(needed)]
    reasons = [f"{needed} is not installed" for needed in absent]
    if archive.is_archive(entry) and not machine.has_file(archive.name(entry)):
        reasons.append(f"{archive.name(entry)} is not there")
    return reasons


def check_source(entry: dict[str, Any]) -> None:
    """Refuse cases that differ from the counted ones, even in the same release."""
    if archive.is_archive(entry):
        path = ROOT / archive.name(entry)
    else:
        name = entry["needs"][0].partition("==")[0]
        path = Path(str(distribution(name).locate_file(entry["source"])))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != entry["sha256"]:
        raise ValueError(f"{path} has the hash {found}, not that of {EXPECTED.name}")


def on_every_instruction_set() -> Iterator[str]:
    before = active_isa()
    try:
        for isa in supported_isas():
            _core.set_isa(isa)
            yield isa
    finally:
        _core.set_isa(before)


def run(cases: Iterable[Case]) -> Result:
    """Check each case with all kernels of this machine; it passes if it passes with each."""
    result = Result()
    for case in cases:
        left_out = None
        try:
            for isa in on_every_instruction_set():
                try:
                    left_out = case.check()
                except AssertionError as error:
                    raise AssertionError(f"{isa}: {error}") from error
        except InexpressibleError as error:
            result.not_expressible[str(error)] += 1
        except Exception as error:  # a refusal of cpattn is a failure like a wrong number
            result.failed[case.name] = f"{type(error).__name__}: {error}"
        else:
            result.passed += 1
            if left_out is not None:
                result.not_compared[left_out] += 1
    return result


def run_suite(name: str, entry: dict[str, Any], sample: Sample = COUNTED) -> Result:
    """Run the cases of a suite, or a sample if the suite has one."""
    check_source(entry)
    adapter = import_module(f"outside.{name}")
    sampled = getattr(adapter, "SAMPLED", False)
    return run(adapter.cases(sample) if sampled else adapter.cases())


def complaints(name: str, result: Result, entry: dict[str, Any]) -> list[str]:
    found = result.counts()
    return [
        f"{name}: {key} is {found[key]}, and {EXPECTED.name} expects {entry[key]}"
        for key in found
        if found[key] != entry[key]
    ]
