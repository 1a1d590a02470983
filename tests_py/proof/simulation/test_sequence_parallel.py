# SPDX-License-Identifier: Apache-2.0
"""yunchang and DeepSpeed's Ulysses, unmodified: what they compute on simulated ranks."""

from __future__ import annotations

import sys
import warnings
from functools import cache

import pytest
import torch

from cpattn.integrations import flash_attn
from cpattn.proof import NotUsable, simulate
from support.proof import sequence_parallel
from support.proof.sequence_parallel import HEADS, TOKENS, Answer, Case, by_deepspeed, by_yunchang
from support.tolerances import assert_attended

needs_yunchang = pytest.mark.skipif(
    not sequence_parallel.is_there("yunchang"),
    reason="yunchang is not there: pip install --no-deps yunchang==0.6.4, "
    "or a folder with its wheel in CPATTN_YUNCHANG",
)
needs_deepspeed = pytest.mark.skipif(
    not sequence_parallel.is_there("deepspeed"),
    reason="DeepSpeed is not there: a folder with deepspeed, einops, hjson and py-cpuinfo in "
    "CPATTN_DEEPSPEED",
)

DEGREES = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
CASES = [
    *(Case(*degrees, layout) for degrees in DEGREES for layout in ("basic", "zigzag", "strip")),
    *(Case(*degrees, "basic", causal=False) for degrees in DEGREES[:3]),
    *(Case(2, 2, layout, kv_heads=4) for layout in ("basic", "zigzag", "strip")),
    Case(2, 2, "zigzag", ulysses_low=False),
    Case(4, 2, "zigzag"),
    Case(2, 4, "zigzag", ulysses_low=False),
    Case(8, 1, "basic"),
]


@pytest.fixture
def on_kernels():
    """``import flash_attn`` finds our functions."""
    with flash_attn.install(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they use names that torch has newer ones for
        yield


@cache
def expected_of(kv_heads, causal=True):
    return sequence_parallel.expected_of(kv_heads, causal)


def assert_answers(answers: dict[int, Answer], expected) -> None:
    """All tokens are there once, each with what one process in float64 has."""
    for answer in answers.values():
        of_rows = expected.rows(answer.rows.numpy())
        assert_attended(answer.out, None, of_rows, "float32", "ring of ranks")
    rows = torch.cat([answer.rows for answer in answers.values()])
    assert rows.sort().values.tolist() == list(range(TOKENS))


def simulated(program, size, **options):
    report = simulate(program, ranks=size, **options)
    assert report.proved, report.text()


@pytest.mark.engine("yunchang")
@needs_yunchang
@pytest.mark.parametrize("case", CASES, ids=str)
def test_yunchang_gives_what_one_process_does(case, on_kernels):
    answers: dict[int, Answer] = {}
    seeds = (0, 1) if case.size == 2 else (0,)
    simulated(by_yunchang(case, answers), case.size, seeds=seeds, own_modules=("yunchang",))
    assert len(answers) == case.size
    assert_answers(answers, expected_of(case.kv_heads, case.causal))
    assert "yunchang" not in sys.modules


@pytest.mark.engine("yunchang")
@needs_yunchang
@pytest.mark.parametrize("layout", ["basic", "strip"])
def test_yunchang_with_rings_low_hands_out_other_tokens_than_it_attends_to(layout, on_kernels):
    """What `docs/proof/simulate.md` says of it: no rank waits or differs, and values are wrong.

    Where this fails, the release has mended it, and the page has to say so.
    """
    case, answers = Case(2, 2, layout, ulysses_low=False), {}
    simulated(by_yunchang(case, answers), 4, seeds=(0,), own_modules=("yunchang",))
    with pytest.raises(AssertionError, match="ring of ranks in float32"):
        assert_answers(answers, expected_of(HEADS))


@pytest.mark.engine("yunchang")
@needs_yunchang
def test_yunchang_with_fewer_kv_heads_than_ulysses_ranks_raises(on_kernels):
    program = by_yunchang(Case(4, 1, "basic", kv_heads=2), {})
    with pytest.raises(NotUsable, match=r"RuntimeError: shape .* is invalid .*all_to_all\.py"):
        simulate(program, ranks=4, own_modules=("yunchang",))


@pytest.mark.engine("deepspeed")
@needs_deepspeed
@pytest.mark.parametrize(("size", "kv_heads"), [(2, 8), (2, 2), (4, 4), (8, 8)])
def test_deepspeed_gives_what_one_process_does(size, kv_heads, on_kernels):
    answers: dict[int, Answer] = {}
    simulated(by_deepspeed(kv_heads, answers), size, time_limit=600)  # it compiles at first
    assert len(answers) == size
    assert_answers(answers, expected_of(kv_heads))


@pytest.mark.engine("deepspeed")
@needs_deepspeed
def test_deepspeed_with_heads_that_its_group_does_not_divide_is_refuted(on_kernels):
    """It shares out uneven heads by the rank of a group of its own, not of the one it is given."""
    (finding,) = simulate(by_deepspeed(HEADS, {}), ranks=3, time_limit=600).findings
    assert finding.kind == "other-size"
    assert "all_to_all_single" in finding.what
