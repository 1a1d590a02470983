# SPDX-License-Identifier: Apache-2.0
"""What is not of the form that a signature says is a finding, and no refusal of the operator."""

from __future__ import annotations

import re

import pytest

import cpattn
from cpattn.proof import conform
from cpattn.proof.conformance import SIGNATURES, Answer, Signature
from support.proof.conformance import AT_EDGES, deformed
from support.proof.conformance.broken import returning
from support.proof.conformance.deformed import without_mask

in_16_bits = returning(lambda out, lse: (out, lse.to(out.dtype)))


@pytest.mark.parametrize(
    ("operator", "signature", "message"),
    [
        (without_mask(lambda out, lse: out), "cpattn", "out and lse must be returned, got Tensor"),
        (without_mask(lambda out, lse: (out, None)), "cpattn", "lse must .*, got NoneType"),
        (in_16_bits, "cpattn", "lse must be float32, got b?float16"),
        (
            without_mask(lambda out, lse: (out.to("meta"), lse)),
            "cpattn",
            "out must be on cpu as the queries are, got one on",
        ),
        (deformed.lse_of_varlen_is_none, "flash_attn_varlen", "lse must have shape .*, got"),
        (deformed.RunsWithoutLse, "flashinfer", "out and lse must be returned, got Tensor"),
        (deformed.numpy_of_groups, "sdpa", "out must be a torch.Tensor, got ndarray"),
        (deformed.one_sequence_of_many, "sdpa", "out must be of 2 sequences with"),
        (deformed.flat_where_there_are_groups, "transformers", "out and weights must be returned"),
        (deformed.a_row_too_many, "topk", "indices must be integers of shape .*, got int32 of"),
        (deformed.ranks_of_floats, "dcp_local_indices", "of shape .*, got float64 of"),
        (deformed.ranks_of_which_one_is_silent, "dcp_local_indices", "got NoneType"),
    ],
)
def test_a_wrong_form_is_named(operator, signature, message):
    report = conform(operator, signature=signature, **AT_EDGES)
    assert [finding.kind for finding in report.findings] == ["wrong-form"], report.text()
    assert re.search(message, report.findings[0].what)
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

    report = conform(operator, signature=Signature("mine", usual.features, call), **AT_EDGES)
    assert [finding.kind for finding in report.findings] == ["raises"], report.text()
    assert "ValueError: too many values to unpack" in report.findings[0].what


@pytest.mark.parametrize("operator", [returning(lambda out, lse: (out, None)), in_16_bits])
def test_a_log_sum_exp_that_is_not_claimed_is_not_looked_at(operator):
    report = conform(operator, signature="cpattn", without=["lse", "sinks"], **AT_EDGES)
    assert report.proved, report.text()
    assert report.not_checked["LSE"] == "there is no log-sum-exp, and there are no sinks"
