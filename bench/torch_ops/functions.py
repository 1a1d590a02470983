# SPDX-License-Identifier: Apache-2.0
"""Operators of torch, functions, and the core that these call, on inputs with hardly any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import cpattn
import cpattn.integrations.torch_ops
from bench.torch_ops.calls import in_turns
from cpattn import _core

OPERATORS = torch.ops.cpattn
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
        """Check that all three give the same."""
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
        call: Callable[..., Any] = _core.paged_attention  # which takes the inputs first
        *tensors, table = inputs
        call(
            *tensors, None, table, None, None, None, None, "NHD", None, None, None, 0.25, True,
            None, 0.0, None, None, None, None, False, False, False, None, out, lse,
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
