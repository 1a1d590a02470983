# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_extends.py and bench_kv_dtypes.py that a wrong benchmark would come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.attention import extends, kv_dtypes, turns
from bench.attention.extends import Group
from bench.attention.peers import inputs
from bench.attention.turns import Entrant, Roofline, Turns, check, spots
from bench.attention.worker import Worker
from bench.attention.workloads import Workload
from bench.harness.comparison import ahead_of_all, percent_of_peak
from bench.harness.contender import Failed
from bench.harness.sampling import Lane

PAGED = Workload("paged", (3, 5), (20, 41), page_size=16, num_heads=4, num_kv_heads=2, head_dim=64)
PAGED = replace(PAGED, v_head_dim=64)
FORMATS = [("bfloat16", "tensor"), *kv_dtypes.FORMATS]
NORMAL = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 1 / 16, "bfloat16": 2**-8}


def stored_as(dtype: str, scale: str) -> Workload:
    return replace(PAGED, kv_dtype=None if dtype == "bfloat16" else dtype, kv_scale=scale)


def attention(tensors: inputs.Inputs) -> torch.Tensor:
    """Compute attention of all queries, in float64."""
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


@pytest.mark.parametrize(("dtype", "scale"), FORMATS)
def test_codes_stand_for_normal_numbers(dtype, scale, tmp_path):
    tensors = inputs.make(stored_as(dtype, scale), tmp_path)
    k, v = tensors.tokens(1, 0, 46, torch.float32)
    assert k.shape == v.shape == (46, 2, 64)
    for x in (k, v):
        assert abs(float(x.mean())) < 0.1
        assert 0.9 < float(x.std()) < 1.1
    assert not torch.equal(k, v)
    drawn = inputs.Numbers(tensors.work)
    drawn.rows(len(tensors.q) * 4, 64)
    exact = drawn.rows(tensors.k_cache[..., 0].numel(), 64).view(tensors.k_cache.shape)
    page, slot = tensors.block_tables[1, 1], 3
    step = NORMAL[dtype] * exact[page, slot].abs().clamp(min=1)
    assert ((k[16 + slot] - exact[page, slot]).abs() <= step).all()


def test_bytes_are_those_of_codes_and_scales():
    bf16 = PAGED.kv_bytes
    assert bf16 == (23 + 46) * 2 * 128 * 2
    assert stored_as("int8", "tensor").kv_bytes == bf16 / 2
    assert stored_as("int8", "token").kv_bytes == bf16 / 2 + (23 + 46) * 2 * 2 * 4


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


def test_the_roofline_is_the_lower_limit():
    roofline = Roofline(1, [(100.0, 10.0), (90.0, 12.0)])
    assert roofline.flops(2.0) == [20.0, 24.0, 24.0]
    assert roofline.flops(50.0) == [100.0, 90.0, 90.0]
    assert roofline.bytes() == [10.0, 12.0, 12.0]


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


def test_caches_that_are_too_large_are_named():
    group = Group(65536, 16, 8, 128, "bfloat16")
    rows = [row for rows in extends.run(group, {}, 2, 1.0) for row in rows]
    assert len(rows) == len(extends.NEW)
    assert {row["status"] for row in rows} == {"too large"}


def test_a_slow_peer_is_out_of_what_follows(monkeypatch):
    class Answering:
        def prepare(self):
            return {"stage": 0.0, "run": 5.0, "compiled": False}, torch.ones(2, 1, 1)

    made = [Entrant("peer", "peer", None, replace(PAGED, name=f"{n} new"), None) for n in (1, 2)]
    monkeypatch.setattr(Entrant, "prepare", Answering.prepare)
    monkeypatch.setattr(turns, "check", lambda *_: 0.0)
    monkeypatch.setattr(Roofline, "__call__", lambda self: 1.0)
    taken = turns.take_turns(made, 1, 1.0, long=4.0, patience=4.0)
    assert [entrant.work.name for entrant, _ in taken.lanes] == ["1 new"]
    ((entrant, row),) = taken.failed
    assert (entrant.work.name, row["status"]) == ("2 new", "too slow")
    assert row["reason"] == "5.0 s for 1 new"


def test_a_worker_holds_several_workloads_of_one_cache(tmp_path):
    group = Group(50, 2, 4, 64, "bfloat16", (1, 7))
    works = {str(new): group.work(new) for new in group.new}
    inputs.make(works["7"], tmp_path)
    loaded = inputs.load(works["7"], tmp_path)
    again = inputs.load(works["1"], tmp_path, loaded)
    assert again.k_cache is loaded.k_cache
    assert (again.q.shape, again.block_tables.shape) == ((2, 32, 64), (2, 1))
    worker = Worker("ours", 1)
    for which, work in works.items():
        assert work.kv_lens == [50 + work.new[0]] * 2
        row = {**work.__dict__, "new": list(work.new), "prefix": list(work.prefix)}
        worker.prepare(row, str(tmp_path), str(tmp_path / f"out{which}"), which)
    assert len(inputs.output(works["7"], tmp_path / "out7")) == 14
    for which in works:
        assert worker.sample(1, which)["run"] > 0
    worker.forget()
    assert worker.loaded is None
