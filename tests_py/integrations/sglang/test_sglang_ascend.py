# SPDX-License-Identifier: Apache-2.0
"""sglang's `AscendAttnBackend`, unmodified, over gloo ranks: the whole of a prefill in float64.

sglang's own code builds the metadata, shards, gathers K and V, writes its pools, calls the
operator twice and gathers the result. Of this library there is the operator.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from support.distributed.distributed_worker import run_world
from support.distributed.prefill_batches import Case, expected_of, make_batch, slots_of
from support.tolerances import assert_attended

# Not imported here, where it would need a stand-in of triton.
pytestmark = [
    pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.engine("sglang"),
]
CASES = [
    Case("one request", (29,)),
    Case("one cached token (#23415)", (367,), (1,), page_size=16),
    Case("prefix longer than the new tokens", (21,), (700,), page_size=16),
    Case("a batch", (17, 40, 8), (64, 0, 7), page_size=16),
    Case("pages of 128", (33, 20), (130, 7), page_size=128, head_dim=128, v_head_dim=128),
    Case("a prefix that ends with its page", (10, 14), (16, 32), page_size=16),
    Case("one KV head", (30, 18), (9, 0), page_size=16, num_heads=8, num_kv_heads=1),
    Case("a KV head for each head", (30, 18), (9, 0), page_size=16, num_kv_heads=4),
    Case("narrow values", (21, 18), (6, 0), page_size=16, head_dim=48, v_head_dim=32),
    Case("rows after the last token", (9, 16), (3, 5), page_size=16, num_tokens=30),
]
CASES += [replace(case, name=f"{case.name}, bfloat16", dtype=torch.bfloat16) for case in CASES[2:5]]


WIDE = {"page_size": 16, "head_dim": 128, "v_head_dim": 128}
UNSPLIT = {
    "EXTEND": Case("too few new tokens to split", (3, 2, 7), (5, 40, 0), **WIDE),
    "DECODE": Case("decode", (1, 1, 1), (5, 40, 130), **WIDE),
}


def run_sglang(rank: int, *arguments) -> dict[str, dict]:
    from support.sglang import (
        sglang_ascend_worker,  # not in this process, which is to stay without stand-ins
    )

    return sglang_ascend_worker.run_cases(rank, *arguments)


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    """The answers of all ranks to all cases."""
    path = tmp_path_factory.mktemp("world")
    preload = "sglang_runtime"
    arguments = (request.param, CASES, UNSPLIT)
    return run_world(request.param, path, run_sglang, *arguments, preload=preload)


@pytest.mark.parametrize("case", [*CASES, *UNSPLIT.values()], ids=lambda case: case.name)
def test_the_whole_is_attention_in_float64(answers, case):
    expected = expected_of(case)
    dtype = str(case.dtype).removeprefix("torch.")
    mine, *others = (answer[case.name]["out"] for answer in answers)
    assert_attended(mine, None, expected, dtype)
    for other in others:
        assert torch.equal(other, mine)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_rank_has_the_bits_of_do_cp_attn_fia(answers, case):
    for answer in answers:
        assert torch.equal(answer[case.name]["local"], answer[case.name]["ours"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_of_physical_padding_are_zero(answers, case):
    locals_ = [answer[case.name]["local"] for answer in answers]
    assert {len(local) % (2 * len(answers)) for local in locals_} == {0}
    num_pad_rows = 0
    for answer, local in zip(answers, locals_, strict=True):
        pad_rows = local[answer[case.name]["num_rows"] :]
        assert torch.all(pad_rows == 0)
        num_pad_rows += len(pad_rows)
    assert num_pad_rows == sum(map(len, locals_)) - sum(case.extend_lens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_s_pool_holds_every_token_and_nothing_else(answers, case):
    batch = make_batch(case)
    for answer in answers:
        for name, rows in (("k_cache", batch.k), ("v_cache", batch.v)):
            expected = torch.full_like(answer[case.name][name], torch.nan)
            for s, x in enumerate(rows):
                expected[slots_of(batch.block_tables, s, len(x), case.page_size)] = x
            torch.testing.assert_close(
                answer[case.name][name], expected, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_metadata_of_the_plug_in_give_the_same_bits(answers, case):
    for answer in answers:
        own, ours = answer[case.name], answer[case.name]["with the plug-in"]
        assert ours["plans_are_one_block"]
        assert not own["plans_are_one_block"]
        assert torch.equal(ours["local"], own["local"])
        assert torch.equal(ours["out"], own["out"])
