# SPDX-License-Identifier: Apache-2.0
"""Contenders in separate processes; a failure is a row, not the end of the run."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import cpattn.reference
from bench.attention.peers import NAMES, inputs
from bench.attention.workloads import Case, Workload, starts
from bench.harness import accuracy, sampling
from bench.harness.contender import Contender, Failed
from bench.harness.figures import Row
from bench.harness.sampling import OURS, Lane


def contenders(modules: list[str], num_threads: int, python: str) -> dict[str, Contender]:
    """cpattn in this interpreter, the peers in theirs; all start at once."""
    made = {
        module: contender(module, num_threads, sys.executable if module == "ours" else python)
        for module in modules
    }
    for one in made.values():
        one.start()
    return made


def contender(module: str, num_threads: int, python: str) -> Contender:
    command = [python, "-m", "bench.attention.worker", module, str(num_threads)]
    return Contender(NAMES[module], command, num_threads)


def race(
    case: Case, contenders: Mapping[str, Contender], peak: Callable[[], float], budget: float
) -> list[Row]:
    """The rows of a case: each contender checked, then sampled in turns with the others.

    A peer's samples may take `budget` seconds; those of cpattn, the first, more. The peak is in
    units of work per second.
    """
    rows: list[Row] = []
    lanes: list[Lane] = []
    with data(case.workload) as folder:
        expected = None
        for module, contender in contenders.items():
            if module != "ours" and (not case.peers or module == case.without):
                continue
            try:
                first, result = prepared(contender, case.workload, folder)
                error = check(result, expected, case.workload, folder)
            except Failed as failed:
                rows.append(failed.row(contender.name))
                continue
            if expected is None:
                expected = result.clone()
            lanes.append(Lane(contender, first, error, budget * (1 if lanes else OURS)))
    peaks = sampling.sample(lanes, peak)
    return [measured(lane, peaks, case.workload) for lane in lanes] + rows


def measured(lane: Lane, peaks: list[float], work: Workload) -> Row:
    """The row of a contender that ran, with the report of its first call."""
    row = sampling.measured(lane, peaks, work.work)
    if lane.failed is None:
        row |= {name: lane.first[name] for name in ("version", "extra_memory", "note")}
    return row


@contextlib.contextmanager
def data(work: Workload) -> Iterator[Path]:
    """A folder, in memory where possible, with the tensors of a workload."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        inputs.make(work, Path(name))
        yield Path(name)


def prepared(contender: Contender, work: Workload, folder: Path) -> tuple[Row, torch.Tensor]:
    out = folder / "out"
    out.unlink(missing_ok=True)
    first = contender.ask("prepare", work=asdict(work), folder=str(folder), out=str(out))
    return first | {"version": contender.version}, inputs.output(work, out)


def check(
    result: torch.Tensor, expected: torch.Tensor | None, work: Workload, folder: Path
) -> float:
    """The largest relative error of a token's output; Failed if no rounding explains it.

    cpattn, the first, is compared with the float64 oracle on some tokens of each sequence, the
    others with cpattn on all tokens. Each rounds its probabilities and its output once.
    """
    if expected is None:
        rows, expected = oracle(inputs.load(work, folder))
        result = result[rows]
    expected = expected.float().flatten(1)
    difference = result.float().flatten(1) - expected
    error = float((difference.norm(dim=1) / expected.norm(dim=1)).max())
    bound = accuracy.attention(work.dtype, "ours", None)
    if not error <= bound:
        raise Failed("wrong", f"relative error {error:.2g}")
    return error


def oracle(tensors: inputs.Inputs) -> tuple[list[int], torch.Tensor]:
    """Some rows of the queries and their exact outputs: each a sequence of one query."""
    work = tensors.work
    rows, positions, kv_lens, tables = [], [], [], []
    sequences = range(0, len(work.new), -(-len(work.new) // 4))
    for i in sequences:
        begin, end = starts(work.new)[i]
        for row in sorted({begin, (begin + end) // 2, end - 1}):
            rows.append(row)
            position = work.prefix[i] + row - begin
            positions.append(position)
            kv_lens.append(min(position + 1 + work.behind, work.kv_lens[i]))
            tables.append(tensors.block_tables[i])
    out, _ = cpattn.reference.paged_attention(
        tensors.q[rows],
        tensors.k_cache,
        tensors.v_cache,
        q_lens=[1] * len(rows),
        kv_lens=kv_lens,
        first_positions=positions,
        block_tables=torch.stack(tables),
        scale=work.scale,
        causal=False,
        window=(work.window, work.behind),
        alibi_slopes=tensors.slopes,
    )
    return rows, torch.from_numpy(np.asarray(out))
