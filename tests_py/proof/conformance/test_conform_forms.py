# SPDX-License-Identifier: Apache-2.0
"""What is not of the form that a signature says is a finding, and no refusal of the operator."""

from __future__ import annotations

import pytest

import cpattn
from cpattn.proof import conform
from cpattn.proof.conformance import SIGNATURES, Answer, Signature
from support.proof.conformance import SECONDS, deformed


@pytest.mark.parametrize(
    ("operator", "signature", "message"),
    [
        (deformed.no_lse_of_windows, "cpattn", "out and lse must be returned, got Tensor"),
        (deformed.no_lse_of_many, "cpattn", "lse must have shape [1, 1], got NoneType"),
        (deformed.lse_in_16_bits, "cpattn", "lse must be float32, got float16"),
        (deformed.on_another_device, "cpattn", "out must be on cpu as the queries are, got one on"),
        (deformed.lse_of_varlen_is_none, "flash_attn_varlen", "lse must have shape [1, 1], got"),
        (deformed.RunsWithoutLse, "flashinfer", "out and lse must be returned, got Tensor"),
        (deformed.numpy_of_groups, "sdpa", "out must be a torch.Tensor, got ndarray"),
        (deformed.one_sequence_of_many, "sdpa", "out must be of 2 sequences with"),
        (deformed.flat_where_there_are_groups, "transformers", "out and weights must be returned"),
        (deformed.a_row_too_many, "topk", "indices must be integers of shape [1, 1], got int32 of"),
        (deformed.ranks_of_floats, "dcp_local_indices", "of shape [1, 1], got float64 of"),
        (deformed.ranks_of_which_one_is_silent, "dcp_local_indices", "[1, 1], got NoneType"),
    ],
)
def test_a_wrong_form_is_named(operator, signature, message):
    report = conform(operator, signature=signature, examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == ["wrong-form"], report.text()
    assert message in report.findings[0].what
    # Rows of padding are what cpattn's flash_attn_varlen_func refuses.
    assert all("sum(q_lens) = #" in said for said in report.facts["refused"])


def test_what_an_adapter_cannot_take_apart_is_no_refusal():
    usual = SIGNATURES["cpattn"]

    def operator(tensors):
        answer = usual.call(cpattn.paged_attention, tensors)
        return answer if tensors.case.causal else (*answer, None)

    def call(fn, tensors):
        out, lse = fn(tensors)
        return Answer(out, lse)

    mine = Signature("mine", usual.features, call)
    report = conform(operator, signature=mine, examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == ["raises"], report.text()
    assert "ValueError: too many values to unpack" in report.findings[0].what


def test_a_log_sum_exp_that_is_not_claimed_is_not_looked_at():
    for operator in (deformed.no_lse, deformed.lse_in_16_bits):
        report = conform(
            operator, signature="cpattn", examples=0, seconds=SECONDS, without=["lse", "sinks"]
        )
        assert report.proved, report.text()
        assert report.not_checked["LSE"] == "there is no log-sum-exp, and there are no sinks"
