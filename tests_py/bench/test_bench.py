# SPDX-License-Identifier: Apache-2.0
"""Parts of bench/ whose faults would make benchmarks wrong, and the tables of their results."""

import ast
import json
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
import write_figures

import cpattn
from bench.attention import kv_dtypes, race, workloads
from bench.attention.peers import inputs
from bench.attention.turns import Entrant, check, spots
from bench.attention.workloads import Workload
from bench.harness import environment, program, sampling
from bench.harness.contender import Contender, Failed
from bench.torch_ops import functions, npu
from support.cases import one_after_another
from support.places import ROOT

SMALL = (
    Workload("ragged", (3, 20, 1), (0, 70, 9), page_size=16),
    Workload("alike", (5, 5), (30, 30), page_size=8, window=4),
    replace(workloads.zigzag(1, total=64, size=2), page_size=16),
    workloads.dense(9, num_heads=4, **workloads.ABSORBED),
)
QUIET, NOISY = 100.0, 50.0
BENCH = ROOT / "bench"


def test_a_subject_knows_itself_and_the_harness():
    known = {}
    for path in BENCH.glob("*/**/*.py"):
        folder = path.relative_to(BENCH).parts[0]
        known.setdefault(folder, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "bench":
                known[folder] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bench."):
                known[folder].add(node.module.split(".")[1])
    assert known["harness"] == {"harness"}
    assert known.keys() > {"attention", "sparse", "transfer"}
    for folder, parts in known.items():
        known_to = {"models": {"serving"}}.get(folder, set())  # it takes their prompts and answers
        assert parts <= {folder, "harness"} | known_to, folder


@pytest.mark.parametrize("work", SMALL, ids=lambda work: work.name)
def test_work_counts_visible_pairs_and_keys_are_those_of_the_pages(work, tmp_path):
    inputs.make(work, tmp_path)
    tensors = inputs.load(work, tmp_path)
    batches = list(tensors.batches())
    assert sum(batch.size for batch in batches) == len(work.new)
    pairs = sum(batch.size * int(inputs.visible(batch, work).sum()) for batch in batches)
    assert work.flop == 2 * pairs * work.num_heads * (work.head_dim + work.v_head_dim)
    sequence = 0
    for batch, (k, v) in zip(batches, tensors.gather(), strict=True):
        for i in range(batch.size):
            for j in (0, batch.length // 2, batch.length - 1):
                page, slot = tensors.block_tables[sequence, j // work.page_size], j % work.page_size
                assert torch.equal(k[i, :, j], tensors.k_cache[page, slot])
                assert torch.equal(v[i, :, j], tensors.v_cache[page, slot])
            sequence += 1


def test_workloads_are_those_of_plans_and_budgets():
    for rank in range(3):
        work = workloads.zigzag(rank, total=96, size=3)
        plan = cpattn.build_cp_metadata([work.cached], cp_rank=rank, cp_size=3)
        assert work.kv_lens == [*plan.kv_len_prev_list, *plan.kv_len_next_list]
        assert list(work.new) == [*plan.actual_seq_q_prev_list, *plan.actual_seq_q_next_list]
    for work in workloads.traffic(None, budget=2048):
        assert sum(work.new) <= 2048
        assert min(work.new) >= 1


def test_a_wrong_row_is_found(tmp_path):
    work = SMALL[0]
    tensors = inputs.make(work, tmp_path)
    lens = {"q_lens": list(work.new), "kv_lens": work.kv_lens, "block_tables": tensors.block_tables}
    right = cpattn.paged_attention(tensors.q, tensors.k_cache, tensors.v_cache, **lens)
    race.check(right, None, work, tmp_path)
    for wrong_row in (right[8], torch.nan):
        wrong = right.clone()
        wrong[7] = wrong_row
        with pytest.raises(Failed, match="relative error"):
            race.check(wrong, right, work, tmp_path)


def child(*arguments):
    return Contender("cpattn", [sys.executable, *arguments], 1)


def test_a_crash_and_a_missing_engine_are_rows():
    with pytest.raises(Failed) as failed:
        child("-c", "import os; os.write(2, b'why'); os.abort()").ask("sample", calls=1)
    assert (failed.value.status, failed.value.reason) == ("crashed", "SIGABRT: why")
    missing = child("-m", "bench.attention.worker", "no_such_engine", "1")
    for _ in range(2):
        with pytest.raises(Failed) as failed:
            missing.ask("sample", calls=1)
        assert failed.value.status == "not installed"


def test_samples_beside_a_fallen_peak_are_dropped():
    first = {"stage": 0.0, "run": 1.0, "compiled": False}
    lane = sampling.Lane(child(), first, 0.0, 9.0)
    lane.samples = [(0.0, 1.0, 0), (0.0, 9.0, 1), (0.0, 9.0, 2), (0.0, 2.0, 3)]
    peaks = [QUIET, QUIET, NOISY, QUIET, QUIET]
    row = sampling.measured(lane, peaks, (1.0, "GFLOP"))
    assert (row["samples"], row["dropped"], row["median"], row["noisy"]) == (2, 2, 1.5, False)
    row = sampling.measured(lane, [QUIET, NOISY, NOISY, NOISY, NOISY], None)
    assert (row["samples"], row["dropped"], row["noisy"]) == (4, 0, True)
    assert "percent_of_peak" not in row  # the row has no work


def test_rows_of_parts_that_were_not_measured_and_of_stopped_runs_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "RESULTS", tmp_path)
    options = Namespace(quick=False, only="", budget=0.0)
    row = {"case": {}, "implementation": "us", "status": "absent", "reason": ""}

    def found(name):
        rows = map(json.loads, (tmp_path / name).read_text().splitlines())
        return [(row["part"], row["of"]) for row in rows]

    def kept(*parts, whole):
        rows = [[row | {"part": part, "of": whole}] for part in parts]
        program.measure("b", options, (), rows, ("absent",), whole)
        return found("b.jsonl")

    def stopped():
        yield [row | {"part": "steps", "of": "stopped"}]
        raise KeyboardInterrupt

    assert kept("steps", "trace", whole=True) == [("steps", True), ("trace", True)]
    assert kept("steps", whole=False) == [("trace", True), ("steps", False)]
    assert kept("steps", whole=True) == [("steps", True)]
    with pytest.raises(KeyboardInterrupt):
        program.measure("b", options, (), stopped())
    assert found("b.jsonl") == [("steps", True)]
    assert found("b.jsonl.part") == [("steps", "stopped")]


# Columns that fit into a page beside its navigation.
WIDEST = 100


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_pages_have_their_figures_in_narrow_tables():
    written = ["\n\n".join(write()) for write in write_figures.WRITERS.values()]
    assert min(len(rows_of(text)) for text in written) > 4
    pages = [path.read_text() for path in write_figures.PAGES.glob("*.md")]
    assert [row for text in written + pages for row in rows_of(text) if len(row) > WIDEST] == []


PAGED = Workload("paged", (3, 5), (20, 41), page_size=16, num_heads=4, num_kv_heads=2, head_dim=64)
PAGED = replace(PAGED, v_head_dim=64)
FORMATS = [("bfloat16", "tensor"), *kv_dtypes.FORMATS]


def stored_as(dtype: str, scale: str) -> Workload:
    return replace(PAGED, kv_dtype=None if dtype == "bfloat16" else dtype, kv_scale=scale)


def attention(tensors: inputs.Inputs) -> torch.Tensor:
    work = tensors.work
    parts = [tensors.tokens(i, 0, n, torch.float32) for i, n in enumerate(work.kv_lens)]
    k, v = (torch.cat(of_all) for of_all in zip(*parts, strict=True))
    asked = one_after_another(tensors.q, k, v, work.new, work.kv_lens, scale=work.scale)
    return torch.from_numpy(cpattn.reference.paged_attention(**asked)[0])


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


JOBS = list(functions.jobs())


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_wrong_result_is_found(job):
    def wrong(*tensors):
        result = job.function(*tensors)
        changed = tensors[0] if job.written else result
        changed.view(-1)[0] += 1
        return result

    with pytest.raises(AssertionError):
        replace(job, core=wrong).check()


def test_a_wrong_result_of_torch_npu_is_found():
    _, function, operator = next(iter(npu.jobs()))
    with pytest.raises(AssertionError):
        npu.measure(lambda: [x + 1 for x in function()], operator, rounds=1)
