# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_extends.py and bench_kv_dtypes.py that a wrong benchmark would come from."""

from dataclasses import replace

import pytest
import torch

from bench.attention import kv_dtypes
from bench.attention.peers import inputs
from bench.attention.turns import Entrant, Roofline, Turns, check, spots
from bench.attention.workloads import Workload
from bench.harness.comparison import ahead_of_all, percent_of_peak
from bench.harness.contender import Failed
from bench.harness.sampling import Lane

PAGED = Workload("paged", (3, 5), (20, 41), page_size=16, num_heads=4, num_kv_heads=2, head_dim=64)
PAGED = replace(PAGED, v_head_dim=64)
FORMATS = [("bfloat16", "tensor"), *kv_dtypes.FORMATS]


def stored_as(dtype: str, scale: str) -> Workload:
    return replace(PAGED, kv_dtype=None if dtype == "bfloat16" else dtype, kv_scale=scale)


def attention(tensors: inputs.Inputs) -> torch.Tensor:
    work, rows = tensors.work, []
    for i, (new, prefix) in enumerate(zip(work.new, work.prefix, strict=True)):
        k, v = (
            x.double().repeat_interleave(work.num_heads // work.num_kv_heads, 1)
            for x in tensors.tokens(i, 0, prefix + new, torch.float32)
        )
        q = tensors.q[sum(work.new[:i]) :][:new].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * work.scale
        scores.masked_fill_(~torch.ones(new, prefix + new, dtype=bool).tril(prefix), -torch.inf)
        rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(rows)


def entrant(work, folder, module="ours"):
    return Entrant("cpattn", module, None, work, folder)


@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_a_right_result_passes_and_a_wrong_head_is_found(dtype, scale, tmp_path):
    work = stored_as(dtype, scale)
    right = attention(inputs.make(work, tmp_path)).to(torch.bfloat16)
    check(entrant(work, tmp_path), right, None)
    (_, first), *_ = spots(entrant(work, tmp_path), right)
    assert first.shape == (1, 2, 64)
    wrong = right.roll(1, 1)
    for expected in (None, right):
        with pytest.raises(Failed, match="relative error"):
            check(entrant(work, tmp_path), wrong, expected)


def test_rows_have_shares_of_the_roofline_and_bars(tmp_path):
    work = replace(PAGED, new=(1, 1))
    first = {"version": "", "extra_memory": 0, "note": "", "compiled": False}
    lanes = []
    for name, which, seconds in (("cpattn", "1", 2.0), ("peer", "1", 1.0), ("peer", "2", 9.0)):
        own = replace(entrant(work, tmp_path), name=name, which=which)
        lanes.append((own, Lane(own, first, 0.0, 1.0, samples=[(0.0, seconds, 0)])))
    limit = work.flop / 4 / (work.flop / work.bytes)  # bytes a second: a quarter of the work
    taken = Turns(lanes, [], Roofline(1, [(1e30, limit)]))
    bars = [ahead_of_all("cpattn"), percent_of_peak("cpattn", 65)]
    mine, peer = taken.rows({"case": {}}, bars, "1")
    assert mine["percent_of_peak"] == pytest.approx(200)
    assert peer["percent_of_peak"] == pytest.approx(400)
    assert [bar["met"] for bar in mine["bars"]] == [False, True]
    assert [bar["value"] for bar in mine["bars"]] == pytest.approx([0.5, 200])
    assert "bars" not in taken.rows({}, bars, "2")[0]  # cpattn is not there
