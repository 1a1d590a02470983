# SPDX-License-Identifier: Apache-2.0
"""Libraries as they are: this one's `ContextParallel`, ring-flash-attn."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from cpattn import active_isa
from cpattn.proof import simulate
from support.distributed import ring_worker
from support.distributed.distributed_worker import run_world
from support.distributed.ring_worker import FUNCTIONS, Case, run_case
from support.proof.library_programs import prefill, prefills, run_ring

STRATEGIES = ("zigzag", "interleave", "contiguous")
CASES = [Case(method, (64, 128)) for method in FUNCTIONS]


@pytest.mark.parametrize("size", [2, 3], ids="{} ranks".format)
def test_context_parallel_gives_what_it_gives_over_gloo(size, tmp_path):
    expected = run_world(size, tmp_path, prefills, active_isa(), STRATEGIES)
    for number, strategy in enumerate(STRATEGIES):
        results = {}

        def program(strategy=strategy, results=results):
            results[dist.get_rank()], cp = prefill(strategy)
            assert cp.topology().transport == "tcp"
            assert cp.topology().reason == "ranks are threads of one process"

        report = simulate(program, ranks=size)
        assert report.proved, report.text()
        for rank in range(size):
            assert torch.equal(results[rank], expected[rank][number])


def test_context_parallel_runs_on_many_ranks():
    report = simulate(lambda: prefill("zigzag")[0], ranks=16, seeds=(0,))
    assert report.proved, report.text()


def test_a_rank_that_leaves_context_parallel_is_named():
    (finding,) = simulate(lambda: prefill("zigzag", leaver=1)[0], ranks=2).findings
    assert finding.kind == "rank-returned"
    assert "rank 1 has returned" in finding.what


needs_ring_flash_attn = pytest.mark.skipif(
    not ring_worker.is_there(),
    reason="ring-flash-attn is not there: pip install --no-deps ring-flash-attn==0.1.8, "
    "or a folder with its wheel in CPATTN_RING_FLASH_ATTN",
)


@pytest.mark.engine("ring-flash-attn")
@needs_ring_flash_attn
@pytest.mark.parametrize("size", [2, 4, 16], ids="{} ranks".format)
def test_ring_flash_attn_gives_what_it_gives_over_gloo(size, tmp_path):
    expected = run_world(size, tmp_path, run_ring, active_isa(), CASES) if size < 16 else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that torch has newer ones for
        package = ring_worker.load()
        for case in CASES:
            results = {}

            def program(case=case, results=results):
                rank = dist.get_rank()
                results[rank] = run_case(package, case, rank, size)

            report = simulate(program, ranks=size, seeds=(0, 1) if size < 16 else (0,))
            assert report.proved, report.text()
            for rank, of_cases in enumerate(expected):
                for mine, theirs in zip(results[rank], of_cases[case], strict=True):
                    assert torch.equal(mine, theirs)
