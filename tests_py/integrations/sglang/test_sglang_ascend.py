# SPDX-License-Identifier: Apache-2.0
"""The unmodified `AscendAttnBackend` of sglang over gloo ranks, in float64: only the operator is
from this library."""

from dataclasses import replace

import pytest
import torch

from support.distributed.prefill_batches import Case, expected_of, make_batch, slots_of
from support.sglang.installed import MARKS
from support.tolerances import assert_attended

pytestmark = MARKS
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
WORLD = ("support.sglang.sglang_ascend_worker", CASES, UNSPLIT)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.parametrize("case", [*CASES, *UNSPLIT.values()], ids=lambda case: case.name)
def test_the_whole_is_attention_in_float64(answers, case):
    expected = expected_of(case)
    dtype = str(case.dtype).removeprefix("torch.")
    mine, *others = (answer[case.name]["out"] for answer in answers)
    assert_attended(mine, None, expected, dtype)
    for other in others:
        assert torch.equal(other, mine)


@each_case
def test_each_rank_has_the_bits_of_do_cp_attn_fia_and_zeros_in_pad_rows(answers, case):
    mine = [answer[case.name] for answer in answers]
    assert all(torch.equal(answer["local"], answer["ours"]) for answer in mine)
    assert {len(answer["local"]) % (2 * len(answers)) for answer in mine} == {0}
    pad_rows = [answer["local"][answer["num_rows"] :] for answer in mine]
    assert not any(torch.any(rows) for rows in pad_rows)
    num_rows = sum(len(answer["local"]) for answer in mine)
    assert sum(map(len, pad_rows)) == num_rows - sum(case.extend_lens)


@each_case
def test_every_rank_s_pool_holds_every_token_and_nothing_else(answers, case):
    batch = make_batch(case)
    for answer in answers:
        for name, rows in (("k_cache", batch.k), ("v_cache", batch.v)):
            expected = torch.full_like(answer[case.name][name], torch.nan)
            for s, x in enumerate(rows):
                expected[slots_of(batch.block_tables, s, len(x), case.page_size)] = x
            found = answer[case.name][name]
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@each_case
def test_metadata_of_the_plug_in_give_the_same_bits(answers, case):
    for answer in answers:
        own, ours = answer[case.name], answer[case.name]["with the plug-in"]
        assert (own["plans_are_one_block"], ours["plans_are_one_block"]) == (False, True)
        assert torch.equal(ours["local"], own["local"])
        assert torch.equal(ours["out"], own["out"])
