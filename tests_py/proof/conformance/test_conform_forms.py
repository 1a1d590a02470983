# SPDX-License-Identifier: Apache-2.0
"""What is not of the form that a signature says is a finding, and no refusal of the operator."""

from __future__ import annotations

import re

import pytest
from torch.nn.functional import scaled_dot_product_attention

from cpattn.integrations.flash_attn import flash_attn_varlen_func
from cpattn.integrations.flashinfer import BatchPrefillWithPagedKVCacheWrapper
from cpattn.proof import conform
from cpattn.proof.conformance import SIGNATURES, Answer, Signature
from cpattn.sparse import dcp_local_indices, fast_topk
from support.proof.conformance import AT_EDGES
from support.proof.conformance.broken import attention, returning


def without_mask(change):
    """Returns what `change` makes of the right results where there is no causal mask."""

    def operator(q, k, v, *, causal, **options):
        answer = attention(q, k, v, causal=causal, **options)
        return answer if causal else change(*answer)

    return operator


def lse_of_varlen_is_none(*arguments, **options):
    out, *rest = flash_attn_varlen_func(*arguments, **options)
    return (out, *rest) if options["causal"] else (out, None, None)


class RunsWithoutLse(BatchPrefillWithPagedKVCacheWrapper):
    def plan(self, *arguments, **options):
        self.causal = options["causal"]
        super().plan(*arguments, **options)

    def run(self, *arguments, **options):
        out, lse = super().run(*arguments, **options)
        return (out, lse) if self.causal else out


def numpy_of_groups(q, k, v, *, enable_gqa=False, **options):
    out = scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)
    return out.numpy() if enable_gqa else out


def one_sequence_of_many(q, k, v, **options):
    out = scaled_dot_product_attention(q, k, v, **options)
    return out if len(out) == 3 else out[:1]


def flat_where_there_are_groups(module, query, key, value, mask, *, scaling, **options):
    groups = module.num_key_value_groups
    out = scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, enable_gqa=groups > 1
    ).transpose(1, 2)
    return out if groups > 1 else (out, None)


def a_row_too_many(scores, lengths, topk, row_starts=None):
    chosen = fast_topk(scores, lengths, topk, row_starts)
    return chosen if row_starts is None else chosen[[*range(len(chosen)), 0]]


def ranks_of_floats(indices, *, dcp_size, **options):
    local = dcp_local_indices(indices, dcp_size=dcp_size, **options)
    return local.double() if dcp_size > 2 else local


def ranks_of_which_one_is_silent(indices, *, dcp_rank, **options):
    return None if dcp_rank == 2 else dcp_local_indices(indices, dcp_rank=dcp_rank, **options)


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
        (lse_of_varlen_is_none, "flash_attn_varlen", "lse must have shape .*, got"),
        (RunsWithoutLse, "flashinfer", "out and lse must be returned, got Tensor"),
        (numpy_of_groups, "sdpa", "out must be a torch.Tensor, got ndarray"),
        (one_sequence_of_many, "sdpa", "out must be of 2 sequences with"),
        (flat_where_there_are_groups, "transformers", "out and weights must be returned"),
        (a_row_too_many, "topk", "indices must be integers of shape .*, got int32 of"),
        (ranks_of_floats, "dcp_local_indices", "of shape .*, got float64 of"),
        (ranks_of_which_one_is_silent, "dcp_local_indices", "got NoneType"),
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
        answer = usual.call(attention, tensors)
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
