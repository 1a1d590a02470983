# SPDX-License-Identifier: Apache-2.0
"""Right operators of this library, torch and transformers raise no finding."""

from importlib import import_module

import pytest
from hypothesis import find, settings
from hypothesis.errors import NoSuchExample

import cpattn
from cpattn_proof import conform
from cpattn_proof.conformance import SIGNATURES, Case, Features, Signature
from cpattn_proof.conformance.strategies import cases
from cpattn_proof.conformance.trials import Budget, sweep
from support.proof.conformance import AT_EDGES, broken, false_alarms
from support.proof.conformance.right_operators import ATTENTION, SELECTIONS, RightOperator
from support.time_limits import PATIENCE


def tried(operator, **options):
    given = {"signature": operator.signature, "without": operator.without}
    return conform(operator.path, **given, time_limit=PATIENCE, **options)


# One operator of each signature is enough where time is short.
QUICK = {operator.signature: name for name, operator in reversed(ATTENTION.items())}.values()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in ATTENTION
        if name != "transformers eager"
    ],
)
def test_what_is_right_raises_no_finding(name):
    report = tried(ATTENTION[name], examples=10 if name in QUICK else 40)
    assert report.proved, report.text()
    assert {"OWN", "COV", "LEN"} <= set(report.checked)
    features = SIGNATURES[ATTENTION[name].signature].features
    assert ("LSE" in report.checked) == (features.lse or features.sinks)
    assert ("ADDR" in report.checked) == features.far
    assert report.facts["answered"] >= report.facts["cases"] / 2  # flash lacks kernels for some


def test_false_alarms_are_told_and_counted(capsys, monkeypatch):
    wrong = RightOperator("support.proof.conformance.broken_selections:topk_padding", "topk")
    monkeypatch.setattr(false_alarms, "SELECTIONS", SELECTIONS | {"mine": wrong})
    gone = RightOperator("a_package_that_is_gone:attention", "sdpa", "gone")
    monkeypatch.setattr(false_alarms, "ATTENTION", {"mine, gone": gone})
    few = ["--cases", "30", "--seconds", "1"]
    assert false_alarms.main([*few, "--only", "fast_topk"]) == 0
    assert capsys.readouterr().out.endswith(" cases, 0 false alarms\n")
    assert false_alarms.main([*few, "--only", "mine"]) == 1
    out = capsys.readouterr().out
    assert "mine, gone: left out: conform: a_package_that_is_gone:attention: Module" in out
    assert "mine: a false alarm\nTOPK topk-padding: " in out
    assert out.splitlines()[-1].endswith(" cases, 1 false alarms")
    with pytest.raises(SystemExit):
        false_alarms.main(["--only", "absent"])
    assert "--only must be in one of mine, gone, " in capsys.readouterr().err


def test_an_operator_of_a_device_begins_anew(tmp_path, monkeypatch):
    """A module that has used a device before a fork cannot use it after the fork."""
    (tmp_path / "used.py").write_text(
        "import cpattn\n"
        "used = []\n"
        "def attention(*args, **options):\n"
        "    assert not used\n"
        "    return cpattn.paged_attention(*args, **options)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_module("used").used.append("a device")
    report = conform(
        "used:attention", signature="cpattn", without=["far"], examples=0, device="cpu:0"
    )
    assert not report.findings, report.text()


def test_an_adapter_of_ones_own():
    features = Features(causal=(False,), page_sizes=(4,))
    adapter = Signature("without masks", features, SIGNATURES["cpattn"].call)
    report = conform(cpattn.paged_attention, signature=adapter, examples=10)
    assert report.proved, report.text()
    assert report.facts["signature"] == "without masks"


def refuses(q, k, v, *, softcap=0.0, **options):
    if softcap:
        raise NotImplementedError(f"no softcap, got {softcap}")
    return cpattn.paged_attention(q, k, v, **options)


def test_what_a_signature_cannot_say_cannot_be_left_out():
    said = "must be of prefix, .*, causal, float32, .* without, got 'lse'"
    with pytest.raises(ValueError, match=said):
        conform(cpattn.paged_attention, signature="sdpa", without=["lse"])


def test_what_is_not_claimed_is_no_finding_and_what_is_refused_is_counted():
    swallows = broken.operator_of("softcap-ignored")  # test_conform_faults.py finds it
    assert conform(swallows, signature="cpattn", without=["softcap"], **AT_EDGES).proved
    report = conform(refuses, signature="cpattn", **AT_EDGES)
    assert report.proved
    assert report.facts["refused"] == {"NotImplementedError: no softcap, got #.#": 1}
    answered, cases = report.facts["answered"], report.facts["cases"]
    assert answered == cases - 1
    said = f", {answered} of {cases} cases answered, 1 refused (1 no softcap, got #.#) ("
    assert said in report.text()


def test_a_case_like_another_may_be_as_long():
    features, long = SIGNATURES["cpattn"].features, Case(q_lens=(1,), kv_lens=(1500,))
    few = settings(max_examples=120, database=None, derandomize=True)
    found = find(cases(features, long), lambda case: max(case.kv_lens) >= 1500, settings=few)
    assert (found.q_lens, found.kv_lens) == ((1,), (1500,))
    with pytest.raises(NoSuchExample):
        find(cases(features), lambda case: max(case.kv_lens) >= 1500, settings=few)


class Right:
    verdict = "right"


def test_the_same_seed_makes_the_same_cases():
    def made(seed):
        tried = []
        budget = Budget(8, float("inf"), seed)
        others = cases(SIGNATURES["cpattn"].features)
        sweep(lambda case: tried.append(case) or Right(), [], others, budget, lambda *_: None)
        return tried

    assert made(5) == made(5) != made(6)
