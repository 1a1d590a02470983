# SPDX-License-Identifier: Apache-2.0
"""Rank programs of the zoo: each is refuted by its invariant, and proved once mended."""

from __future__ import annotations

import pytest

from cpattn.proof.zoo import all_entries, visit

ENTRIES = [entry for entry in all_entries() if entry.tool == "simulate"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.bug)
def test_the_simulator_tells_the_bug_from_its_mend(entry):
    outcome = visit(entry)
    assert outcome.refuted, outcome.says
    assert outcome.proved, entry.mended().text()


def test_all_are_there():
    assert {entry.bug.partition("/")[2] for entry in ENTRIES} == {
        "vllm-ascend#12036",
        "TensorRT-LLM#14020",
        "sglang#30760",
        "ART#840",
        "DeepSpeed#7384",
    }
