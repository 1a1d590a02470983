# SPDX-License-Identifier: Apache-2.0
"""The unmodified ring-flash-attn is right on our kernels: ranks agree with float64."""

from functools import cache

import numpy as np
import pytest
import torch

from support.cases import expected_attention, one_after_another
from support.distributed import ring_worker
from support.distributed.distributed_worker import run_world
from support.distributed.ring_worker import Case, make_batch, rows_of
from support.tolerances import Expected, assert_attended

pytestmark = [
    pytest.mark.skipif(
        not ring_worker.is_there(),
        reason="ring-flash-attn is not there: pip install --no-deps ring-flash-attn==0.1.8, "
        "or a folder with its wheel in CPATTN_RING_FLASH_ATTN",
    ),
    pytest.mark.engine("ring-flash-attn"),
]

EQUAL, RAGGED, UNEVEN = (48, 48), (16, 40, 8), (13, 30, 1, 20)  # each method divides one
METHODS = [
    *(("zigzag", EQUAL, True), ("zigzag_varlen", RAGGED, True), ("stripe", EQUAL, True)),
    *(("ring", EQUAL, True), ("ring", EQUAL, False)),
    *(("ring_varlen", RAGGED, True), ("ring_varlen", RAGGED, False)),
    *(("llama3_varlen", UNEVEN, True), ("llama3_varlen", UNEVEN, False)),
]
CASES = [Case(*method, dtype) for dtype in ("float32", "bfloat16") for method in METHODS]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    return run_world(request.param, path, ring_worker.run_cases, CASES)


@cache
def expected_of(case: Case) -> Expected:
    inputs = one_after_another(*make_batch(case), case.lens, case.lens, causal=case.causal)
    return expected_attention(inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_that_of_one_process(answers, case):
    expected = expected_of(case)
    seen = []
    for rank, answer in enumerate(answers):
        out, lse = answer[case]
        rows = rows_of(case, rank, len(answers)).numpy()
        assert out.dtype == getattr(torch, case.dtype)
        assert_attended(out, lse.T, expected.rows(rows), case.dtype, "ring of ranks")
        seen.append(rows)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(sum(case.lens)))
