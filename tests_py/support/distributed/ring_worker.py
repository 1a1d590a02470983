# SPDX-License-Identifier: Apache-2.0
"""Runs ring-flash-attn from PyPI on ranks of gloo: how its methods divide a batch, and results. The
folder CPATTN_RING_FLASH_ATTN has its wheel or the package; else an installed one is used."""

import os
import sys
import types
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from bench.context_parallel.ring_flash_attn import import_on_kernels

HEADS, KV_HEADS, DIM = 4, 2, 32
FUNCTIONS = {
    "ring": "ring_flash_attn_func",
    "ring_varlen": "ring_flash_attn_varlen_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "zigzag_varlen": "zigzag_ring_flash_attn_varlen_func",
    "stripe": "stripe_flash_attn_func",
    "llama3_varlen": "llama3_flash_attn_varlen_func",
}


@dataclass(frozen=True)
class Case:
    method: str
    lens: tuple[int, ...]
    causal: bool = True
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.method}-{'causal' if self.causal else 'full'}-{self.dtype}"


def is_there() -> bool:
    if folder := os.environ.get("CPATTN_RING_FLASH_ATTN"):
        wheels = sorted(map(str, Path(folder).glob("ring_flash_attn-*.whl")))
        sys.path.insert(0, (wheels or [folder])[0])
    return find_spec("ring_flash_attn") is not None


def load() -> types.ModuleType:
    assert is_there()
    return import_on_kernels()


def make_batch(case: Case) -> list[torch.Tensor]:
    """Return q, k and v of all tokens, sequence after sequence; they are equal on all ranks."""
    random = torch.Generator().manual_seed(sum(case.lens))
    dtype = getattr(torch, case.dtype)
    return [
        torch.randn(sum(case.lens), heads, DIM, generator=random).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def rows_of(case: Case, rank: int, size: int) -> torch.Tensor:
    if case.method == "llama3_varlen":  # it ignores the borders of sequences
        return torch.arange(sum(case.lens)).chunk(size)[rank]
    mine = []
    for rows in torch.arange(sum(case.lens)).split(case.lens):
        if case.method.startswith("zigzag"):
            blocks = rows.chunk(2 * size)
            mine += [blocks[rank], blocks[2 * size - 1 - rank]]
        elif case.method == "stripe":
            mine.append(rows[rank::size])
        else:
            mine.append(rows.chunk(size)[rank])
    return torch.cat(mine)


def run_case(package: types.ModuleType, case: Case, rank: int, size: int):
    """Return out [tokens, heads, dim] and LSE [heads, tokens] of this rank's tokens."""
    rows = rows_of(case, rank, size)
    q, k, v = (x[rows] for x in make_batch(case))
    ends = torch.tensor([0, *case.lens]).cumsum(0).int()
    options = {"causal": case.causal, "return_attn_probs": True}
    function = getattr(package, FUNCTIONS[case.method])
    if case.method == "llama3_varlen":
        prepared = package.llama3_flash_attn_prepare_cu_seqlens(ends, case.causal, rank, size)
        *arguments, local_k_slice = prepared
        out, lse, _ = function(
            q, k, v, *arguments, heads_k_stride=1, local_k_slice=local_k_slice, **options
        )
        return out, lse
    if case.method.endswith("varlen"):
        out, lse, _ = function(q, k, v, ends // size, max(case.lens) // size, **options)
        return out, lse
    out, lse, _ = function(*(x.unflatten(0, (len(case.lens), -1)) for x in (q, k, v)), **options)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def run_cases(rank: int, cases: list[Case]) -> dict[Case, tuple[torch.Tensor, torch.Tensor]]:
    warnings.simplefilter("ignore")  # it uses deprecated names of torch
    package = load()
    return {case: run_case(package, case, rank, dist.get_world_size()) for case in cases}
