# SPDX-License-Identifier: Apache-2.0
"""The inputs that fuzzing kept, once each: what reads them raises nothing but its own errors."""

from __future__ import annotations

import importlib

import pytest

from fuzz.reader import Reader
from support.places import TESTS

CORPORA = TESTS / "fuzz" / "corpus"
TARGETS = sorted(folder.name for folder in CORPORA.iterdir())


def test_every_target_has_a_corpus() -> None:
    modules = {path.stem for path in CORPORA.parent.glob("*.py")}
    assert modules - {"__init__", "__main__", "reader"} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    target = importlib.import_module(f"fuzz.{name}")
    inputs = sorted((CORPORA / name).iterdir())
    assert inputs
    for path in inputs:
        target.run(path.read_bytes())


def test_reader_ends_in_zeros() -> None:
    reader = Reader(b"\x05\x01")
    assert reader.between(0, 9) == 5
    assert reader.flag()
    assert (reader.any(), reader.rarely(), reader.between(3, 2**40)) == (-2, False, 3)
    assert reader.mostly("value") == "value"
