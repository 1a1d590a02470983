# SPDX-License-Identifier: Apache-2.0
"""Operators of the zoo: each is refuted by its invariant, and proved once mended."""

from __future__ import annotations

import pytest

from cpattn.proof.zoo import visit
from cpattn.proof.zoo.conform import operators, selections

ENTRIES = [*operators.ENTRIES, *selections.ENTRIES]

KINDS = {
    "vllm-project/vllm#39148": {"merge-nan", "nan-on-empty"},
    "vllm-project/vllm#49294": {"lse-finite-on-empty"},
    "flashinfer-ai/flashinfer#4452": {"lse-finite-on-empty"},
    "sgl-project/sglang#35045": {"merge-wrong-base"},
    "NVIDIA/TransformerEngine#3551": {"sink-ignored"},
    "PrimeIntellect-ai/prime-rl#3397": {"sink-ignored"},
    "vllm-project/vllm#47671": {"overflow-32-bit"},
    "local-inference-lab/b12x#55": {"topk-bucket-overflow"},
    "vllm-project/vllm#54541": {"topk-local-ids"},
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.bug)
def test_the_bug_is_named_and_its_mend_proved(entry):
    outcome = visit(entry)
    assert outcome.refuted, outcome.says
    assert outcome.proved, entry.mended().text()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.bug)
def test_the_fault_has_its_name(entry):
    kinds = {found.kind for found in entry.broken().findings}
    assert kinds
    assert kinds <= KINDS[entry.bug]
