# SPDX-License-Identifier: Apache-2.0
"""Operators with one fault each are diagnosed by its name alone; wrong forms are, too."""

import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from cpattn.integrations.flash_attn import flash_attn_varlen_func
from cpattn.sparse import dcp_local_indices
from cpattn.sparse.sglang_0_5_23 import fast_topk
from cpattn_proof import conform
from cpattn_proof.conformance import FAULTS, SIGNATURES, Answer, Signature
from support.proof.conformance import AT_EDGES, SECONDS_TO_SHRINK, broken
from support.proof.conformance.broken import attention, returning

SECONDS_OF_HANG = 1.0
# Each stands for others like it where time is short.
QUICK = ("mask-off-by-one", "overflow-32-bit", "crash")


def report_of(operator, signature="cpattn", **options):
    return conform(operator, signature=signature, **{**AT_EDGES, **options})


def the_finding(report, kind):
    assert [finding.kind for finding in report.findings] == [kind], report.text()
    return report.findings[0]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in FAULTS]
)
def test_a_fault_is_named(name):
    others = {
        "pad-rows-read": "flash_attn_varlen", "new-keys-unwritten": "flash_attn_with_kvcache"
    }  # fmt: skip
    signature = others.get(name, "cpattn")
    limit = {"time_limit": SECONDS_OF_HANG} if name == "hang" else {}
    report = report_of(broken.operator_of(name), signature, **limit)
    finding = the_finding(report, name)
    assert finding.invariant == FAULTS[name].invariant
    assert finding.where
    assert finding.picture
    assert report.exit_code == 1
    report.to_json()  # all details are JSON
    if name == "crash":
        assert finding.details["only_when"]["window"] == 3  # failing cases share it
        assert "SIGSEGV" in finding.what
    if name == "mask-off-by-one":  # few keys show weights: a row's own key is hidden
        assert re.search(r"^row +\d+ keys [+.]*-", finding.picture, re.M)
    if name == "unknown":
        assert re.match(r"row \d+, head \d: out\[\d+\] is \S+, not \S+\n", finding.picture)
        wrong = r"^wrong: .*rows?\b.*, .*heads?\b.*, \d+ of \d+ in all$"
        assert re.search(wrong, finding.picture, re.M)
        assert re.search(r"^row +\d+ keys [+.-]*\+", finding.picture, re.M)  # 1.5 times the weight


def mask_ignored_in_groups(q, k, v, *, causal, **options):
    groups = q.shape[1] > k.shape[1 if "kv_layout" in options else 2]
    return attention(q, k, v, causal=causal and not groups, **options)


@pytest.mark.parametrize(
    ("operator", "signature"),
    [(mask_ignored_in_groups, "cpattn"), (broken.sdpa_without_is_causal, "sdpa")],
)
def test_a_name_that_right_results_contradict_is_told_and_not_given(operator, signature):
    """One path of the first operator has no causal mask; the other ignores the flag alone."""
    finding = the_finding(report_of(operator, signature), "unknown")
    ((name, count),) = finding.details["contradicted"].items()
    assert (name, count > 10) == ("mask-ignored", True)
    assert f"mask-ignored explains it, but not why {count} cases came out right" in finding.what


def test_hidden_values_that_some_rows_multiply_are_read_beyond_the_length():
    """No oracle has some rows read a page that others skip, so NaN alone shows the fault."""
    finding = the_finding(report_of(broken.multiplies_hidden_values), "reads-beyond-length")
    assert "is NaN" in finding.what
    assert finding.details["only_when"]["poison"] is True


def test_an_invariant_that_a_finding_breaks_is_checked():
    """Outputs alone show wrong merges if the operator returns no log-sum-exp."""
    report = report_of(broken.operator_of("merge-swapped"), without=["lse", "sinks", "far"])
    assert the_finding(report, "merge-swapped").invariant == "LSE"
    assert "LSE" in report.checked
    assert "LSE" not in report.not_checked


def both(change):
    """Return an operator that ignores windows, and has one more fault."""
    return lambda *tensors, window=None, **options: change(*tensors, **options)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["lse-base-2", "softcap-ignored", "overflow-32-bit"])
def test_two_faults_have_two_names_and_cases_of_their_own(second):
    """The log-sum-exp is diagnosed alone if the output is right."""
    report = report_of(both(broken.operator_of(second)))
    found = {finding.kind: finding.details for finding in report.findings}
    assert set(found) == {"window-ignored", second}, report.text()
    assert found["window-ignored"]["case"]["window"] is not None
    assert found["window-ignored"]["cases"] == 5
    if second != "lse-base-2":
        assert found[second]["cases"] == 1
        assert found[second]["case"]["far"] == 31 * (second == "overflow-32-bit")
        assert (found[second]["only_when"]["softcap"] == 1.0) == (second == "softcap-ignored")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (
            lambda out, lse: (out, lse.masked_fill(lse == -torch.inf, torch.nan)),
            "nan-on-empty",
            "the log-sum-exp is NaN",
        ),
        (broken.infinite, "unknown", "keys ?"),  # no warning is raised
    ],
)
def test_what_is_no_number_is_shown(change, kind, says):
    finding = the_finding(report_of(returning(change)), kind)
    assert says in finding.what + finding.picture


@pytest.mark.slow
def test_a_case_is_made_smaller():
    report = report_of(broken.operator_of("lse-base-2"), seconds=SECONDS_TO_SHRINK)
    finding = the_finding(report, "lse-base-2")
    assert finding.where == "q_lens=[1], kv_lens=[1]"
    assert finding.details["oracle"] == {"lse_factor": 1 / broken.LN2}


# An answer of another form than the signature's is a finding, and no refusal of the operator.


def without_mask(change):
    """Return an operator that changes the right results where there is no causal mask."""

    def operator(q, k, v, *, causal, **options):
        answer = attention(q, k, v, causal=causal, **options)
        return answer if causal else change(*answer)

    return operator


def lse_of_varlen_is_none(*arguments, **options):
    out, *rest = flash_attn_varlen_func(*arguments, **options)
    return (out, *rest) if options["causal"] else (out, None, None)


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


in_16_bits = returning(lambda out, lse: (out, lse.to(out.dtype)))


FORMS = [
    (without_mask(lambda out, lse: out), "cpattn", "out and lse must be returned, got Tensor"),
    (without_mask(lambda out, lse: (out, None)), "cpattn", "lse must .*, got NoneType"),
    (in_16_bits, "cpattn", "lse must be float32, got b?float16"),
    (
        without_mask(lambda out, lse: (out.to("meta"), lse)),
        "cpattn",
        "out must be on cpu as the queries are, got one on",
    ),
    (lse_of_varlen_is_none, "flash_attn_varlen", "lse must have shape .*, got"),
    (numpy_of_groups, "sdpa", "out must be a torch.Tensor, got ndarray"),
    (one_sequence_of_many, "sdpa", "out must be of 2 sequences with"),
    (flat_where_there_are_groups, "transformers", "out and weights must be returned"),
    (a_row_too_many, "topk", "indices must be integers of shape .*, got int32 of"),
    (ranks_of_floats, "dcp_local_indices", "of shape .*, got float64 of"),
]
FIRST = {form[1]: form for form in reversed(FORMS)}.values()


@pytest.mark.parametrize(
    ("operator", "signature", "message"),
    [pytest.param(*form, marks=() if form in FIRST else pytest.mark.slow) for form in FORMS],
)
def test_a_wrong_form_is_named(operator, signature, message):
    report = report_of(operator, signature)
    assert re.search(message, the_finding(report, "wrong-form").what)
    # cpattn's flash_attn_varlen_func refuses rows of padding.
    assert all("sum(q_lens) = #" in said for said in report.facts["refused"])


def test_what_an_adapter_cannot_take_apart_is_no_refusal():
    usual = SIGNATURES["cpattn"]

    def operator(tensors):
        answer = usual.call(attention, tensors)
        return answer if tensors.case.causal else (*answer, None)

    def call(fn, tensors):
        out, lse = fn(tensors)
        return Answer(out, lse)

    report = report_of(operator, Signature("mine", usual.features, call))
    assert "ValueError: too many values to unpack" in the_finding(report, "raises").what


@pytest.mark.parametrize("operator", [returning(lambda out, lse: (out, None)), in_16_bits])
def test_a_log_sum_exp_that_is_not_claimed_is_not_looked_at(operator):
    report = report_of(operator, without=["lse", "sinks"])
    assert report.proved, report.text()
    assert report.not_checked["LSE"] == "there is no log-sum-exp, and there are no sinks"
