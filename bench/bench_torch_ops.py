# SPDX-License-Identifier: Apache-2.0
"""What a call costs besides its work: operators of torch, functions, and the core they call.

    python bench/bench_torch_ops.py [--quick]

Inputs are so small that little else is left. The core is given the outputs and all defaults; where
the function makes its output, so does what it is compared with. Prints figures and keeps none.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import cpattn
from cpattn import _core, torch_guard

if message := torch_guard.prepare():
    print(message)
import torch
from rich.table import Table

import cpattn.integrations.torch_ops
from report import console

OPERATORS = torch.ops.cpattn
CALLS = 100  # in a sample
OPERATOR_BAR = 10.0  # µs


@dataclass(frozen=True)
class Job:
    """One call in three forms; the first `written` tensors are outputs, if any."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    operator: Callable[..., Any]
    function: Callable[..., Any]
    core: Callable[..., Any]
    written: int

    @property
    def function_bar(self) -> float:
        return 1 + 0.1 * len(self.tensors)  # µs

    def check(self) -> None:
        """All three give the same."""
        results = []
        for form in (self.operator, self.function, self.core):
            tensors = [tensor.clone() for tensor in self.tensors]
            returned = form(*tensors)
            results.append(tensors[: self.written] if self.written else [returned])
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def jobs() -> Iterator[Job]:
    yield Job(
        "merge_state",
        (torch.ones(2, 4, 16), torch.zeros(2, 4), torch.ones(2, 4, 16), torch.zeros(2, 4)),
        OPERATORS.merge_state,
        cpattn.merge_state,
        _core.merge_state,
        written=2,
    )
    lens, table = torch.tensor([2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    cache = torch.ones(1, 16, 1, 16)

    def attention(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda out, lse, q, k, v, q_lens, kv_lens, table: function(
            q, k, v, q_lens=q_lens, kv_lens=kv_lens, block_tables=table, out=out, lse=lse
        )

    def attention_core(out: Any, lse: Any, *inputs: Any) -> None:
        _core.paged_attention(
            *inputs, None, None, None, None, "NHD", 0.25, True, None, 0.0, None, None, False, False,
            None, out, lse,
        )  # fmt: skip

    q = torch.ones(2, 4, 16)
    yield Job(
        "paged_attention",
        (torch.zeros(2, 4, 16), torch.zeros(2, 4), q, cache, cache, lens, lens, table),
        attention(OPERATORS.paged_attention.out),
        attention(cpattn.paged_attention),
        attention_core,
        written=2,
    )

    def hadamard_core(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        _core.hadamard_transform(x, 0.25, out)
        return out

    yield Job(
        "hadamard_transform",
        (torch.ones(1, 16),),
        OPERATORS.hadamard_transform,
        cpattn.sparse.hadamard_transform,
        hadamard_core,
        written=0,
    )


def in_turns(forms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds of a call, the median of samples that take turns."""
    samples: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                form()
            samples[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
    return {name: median(times) for name, times in samples.items()}


def measure(job: Job, rounds: int) -> dict[str, float]:
    job.check()
    tensors = [tensor.clone() for tensor in job.tensors]
    forms = {"operator": job.operator, "function": job.function, "core": job.core}
    calls = {name: lambda form=form: form(*tensors) for name, form in forms.items()}
    times = in_turns(calls, rounds)
    with torch.inference_mode():
        inference = in_turns({name: calls[name] for name in ("operator", "function")}, rounds)
    return {
        "core": times["core"],
        "function": times["function"] - times["core"],
        "operator": times["operator"] - times["function"],
        "inference": inference["operator"] - inference["function"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few calls, bars not judged")
    rounds = 3 if parser.parse_args().quick else 300
    cpattn.set_num_threads(1)
    torch.set_num_threads(1)
    table = Table(title=f"µs a call, medians of {rounds} samples")
    for column in ("", "core", "function adds", "operator adds", "in inference mode", "missed"):
        table.add_column(column)
    missed = False
    gc.disable()
    for job in jobs():
        times = measure(job, rounds)
        bars = {"function": job.function_bar, "operator": OPERATOR_BAR, "inference": OPERATOR_BAR}
        behind = [f"{name} ≤ {bar:g}" for name, bar in bars.items() if times[name] > bar]
        cells = (f"{times[name]:.2f}" for name in ("core", "function", "operator", "inference"))
        table.add_row(f"{job.name}, tensors: {len(job.tensors)}", *cells, ", ".join(behind))
        missed |= bool(behind)
    console().print(table)
    return int(missed and rounds > 3)


if __name__ == "__main__":
    raise SystemExit(main())
