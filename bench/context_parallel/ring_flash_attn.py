# SPDX-License-Identifier: Apache-2.0
"""ring-flash-attn from its wheel, on the kernels here: its methods for a causal prompt."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.context_parallel.exchanges import WAYS
from cpattn.integrations import flash_attn


def import_on_kernels() -> types.ModuleType:
    """The package, from where Python finds it.

    Its adapters import a name that transformers no longer has; they are left out.
    """
    adapters: Any = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules[adapters.__name__] = adapters
    with flash_attn.install():
        return importlib.import_module("ring_flash_attn")


def load(folder: str) -> types.ModuleType:
    """The package, from a folder with its wheel or with itself."""
    warnings.simplefilter("ignore")  # it uses names that torch has newer ones for
    wheels = sorted(map(str, Path(folder).glob("ring_flash_attn-*.whl")))
    sys.path.insert(0, (wheels or [folder])[0])
    return import_on_kernels()


def methods(
    folder: str, layer: Any, shape: Any, check: Callable[[torch.Tensor, torch.Tensor], None]
) -> dict[str, Callable[[], Any]]:
    """Zigzag ring and Llama 3's gather, of this rank's rows, whose results are checked.

    Zigzag rows are in the order of `ContextParallel.shard`.
    """
    package = load(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    zigzag = [x[None] for x in (layer.q, layer.k, layer.v)]
    cp, plan = layer.replicated, layer.plan
    rows = slice(rank * shape.new // size, (rank + 1) * shape.new // size)
    q, k, v = (cp.gather(plan, x)[rows] for x in (layer.q, layer.k, layer.v))
    ends = torch.tensor([0, shape.new], dtype=torch.int32)
    prepared = package.llama3_flash_attn_prepare_cu_seqlens(ends, True, rank, size)
    *arguments, local_k_slice = prepared

    def by_zigzag() -> torch.Tensor:
        return package.zigzag_ring_flash_attn_func(*zigzag, causal=True)[0]

    def by_llama3() -> torch.Tensor:
        return package.llama3_flash_attn_varlen_func(
            q, k, v, *arguments, heads_k_stride=1, local_k_slice=local_k_slice, causal=True
        )

    expected = layer.run(WAYS[0])
    check(by_zigzag(), expected)
    check(by_llama3(), cp.gather(plan, expected)[rows])
    return {"ring-flash-attn zigzag": by_zigzag, "ring-flash-attn llama3": by_llama3}
