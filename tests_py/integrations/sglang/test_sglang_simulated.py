# SPDX-License-Identifier: Apache-2.0
"""sglang's context-parallel strategies on 2 to 16 simulated ranks: proved, and refuted spoiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cpattn.proof import Report, simulate
from support.distributed.prefill_batches import Case, expected_of, make_batch
from support.sglang import sglang_ranks
from support.sglang.installed import MARKS
from support.tolerances import assert_attended

pytestmark = MARKS
SIZES = (2, 3, 16)
LENGTHS = (45, 70, 33), (64, 0, 7)


def simulated(sglang: SimpleNamespace, case: Case, size: int, **spoil: Any) -> tuple[Report, Any]:
    results: dict[int, torch.Tensor] = {}

    def program() -> torch.Tensor:
        results[dist.get_rank()] = sglang_ranks.layer(sglang, case, **spoil)
        return results[dist.get_rank()]

    with sglang_ranks.ranks_of_their_own(sglang, size, case.strategy):
        report = simulate(program, ranks=size, seeds=(0, 1) if size < 16 else (0,))
    return report, results


@pytest.mark.parametrize("strategy", ["zigzag", "interleave"])
@pytest.mark.parametrize("size", SIZES, ids="{} ranks".format)
def test_layers(sglang, size, strategy):
    """Zigzag: metadata, shards, K and V of all ranks, both halves, and the whole again.

    Interleaved: what a DSA layer gathers of its keys is what all ranks have, in the batch's order.
    """
    case = Case("a batch", *LENGTHS, page_size=16, strategy=strategy)
    report, results = simulated(sglang, case, size)
    assert report.proved, report.text()
    assert strategy == "interleave" or "SEQ" in report.checked
    batch = make_batch(case)
    rows = batch.q, batch.new(case, batch.k), batch.new(case, batch.v)
    expected = torch.cat([x.flatten(1) for x in rows], dim=1)
    for rank in range(size):
        if strategy == "zigzag":
            assert_attended(results[rank], None, expected_of(case), "float32")
        else:
            assert torch.equal(results[rank], expected)


def test_a_rank_that_pads_otherwise_is_named(sglang):
    """Ranks that disagree about the rows of a shard gather tensors of other sizes."""

    def spoil(forward_batch: Any, rank: int) -> None:
        metadata = forward_batch.attn_cp_metadata
        if rank == 1:
            metadata.per_rank_logical_token = metadata.per_rank_actual_token

    case = Case("a batch", *LENGTHS, page_size=16)
    report, _ = simulated(sglang, case, 4, spoil=spoil)
    assert "SEQ" in {found.invariant for found in report.findings}
    assert "all_gather_into_tensor" in report.findings[0].what
