# SPDX-License-Identifier: Apache-2.0
"""yunchang's Ulysses and rings, and DeepSpeed's Ulysses, unmodified, on attention of this library.

yunchang is read from its wheel, DeepSpeed from a folder that pip fills:

    pip download --no-deps yunchang==0.6.4 -d DIR
    pip install --no-deps --no-build-isolation -t DIR deepspeed==0.19.8 einops hjson py-cpuinfo

with DIR in CPATTN_YUNCHANG and CPATTN_DEEPSPEED. Without the variables installed ones are used.
DeepSpeed compiles a part of itself when it first meets a process group, which takes a minute.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from cpattn.integrations import flash_attn
from support.cases import expected_attention
from support.tolerances import Expected

HEADS, DIM, TOKENS = 8, 32, 64
_FOLDERS = {
    "yunchang": os.environ.get("CPATTN_YUNCHANG"),
    "deepspeed": os.environ.get("CPATTN_DEEPSPEED"),
}


def is_there(package: str) -> bool:
    """Whether a package can be imported, from the folder of its variable first."""
    if folder := _FOLDERS[package]:
        wheels = sorted(map(str, Path(folder).glob(f"{package}-*.whl")))
        sys.path.insert(0, (wheels or [folder])[0])
    return find_spec(package) is not None


@dataclass(frozen=True)
class Case:
    """Degrees of Ulysses and ring, which layout, and whether Ulysses has ranks side by side."""

    ulysses: int
    ring: int
    layout: str
    causal: bool = True
    kv_heads: int = HEADS
    ulysses_low: bool = True

    @property
    def size(self) -> int:
        return self.ulysses * self.ring

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        order = "" if self.ulysses_low else "-rings-low"
        return f"{self.ulysses}x{self.ring}-{self.layout}-{mask}-{self.kv_heads}{order}"


@dataclass(frozen=True)
class Answer:
    """Outputs of a rank, and which tokens they are of."""

    out: torch.Tensor
    rows: torch.Tensor


def make_batch(kv_heads: int) -> list[torch.Tensor]:
    """q, k and v [1, tokens, heads, dim]; the same on all ranks."""
    random = torch.Generator().manual_seed(kv_heads)
    return [
        torch.randn(1, TOKENS, heads, DIM, generator=random)
        for heads in (HEADS, kv_heads, kv_heads)
    ]


def expected_of(kv_heads: int, causal: bool) -> Expected:
    """The oracle's answer for all tokens."""
    q, k, v = (x[0] for x in make_batch(kv_heads))
    return expected_attention(
        {
            "q": q,
            "k_cache": k,
            "v_cache": v,
            "q_lens": [TOKENS],
            "kv_lens": [TOKENS],
            "block_tables": torch.arange(TOKENS)[None].numpy(),
            "page_size": 1,
            "causal": causal,
        }
    )


def by_yunchang(case: Case, answers: dict[int, Answer]) -> Callable[[], torch.Tensor]:
    """A program: tokens as the package itself hands them out, and its hybrid attention."""

    def program() -> torch.Tensor:
        import yunchang

        rank = dist.get_rank()
        yunchang.set_seq_parallel_pg(case.ulysses, case.ring, rank, case.size, case.ulysses_low)
        extract = yunchang.EXTRACT_FUNC_DICT[case.layout]
        sizes = {"world_size": case.size, "rd": case.ring, "ud": case.ulysses}
        q, k, v = (extract(x, rank, **sizes) for x in make_batch(case.kv_heads))
        rows = extract(torch.arange(TOKENS).view(1, -1, 1), rank, **sizes).flatten()
        layer = yunchang.LongContextAttention(ring_impl_type=case.layout)
        out = layer(q, k, v, causal=case.causal)[0]
        answers[rank] = Answer(out, rows)
        return out

    return program


def by_deepspeed(kv_heads: int, answers: dict[int, Answer]) -> Callable[[], torch.Tensor]:
    """A program: a block of tokens for each rank, and DeepSpeed's attention over all of them."""

    def program() -> torch.Tensor:
        import deepspeed.comm
        from deepspeed.sequence.layer import DistributedAttention

        deepspeed.comm.init_distributed("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        q, k, v = (x.chunk(size, 1)[rank].contiguous() for x in make_batch(kv_heads))
        rows = torch.arange(TOKENS).chunk(size)[rank]
        layer = DistributedAttention(_causal, dist.group.WORLD, 2, 1)
        out = layer(q, k, v, 0)[0]
        answers[rank] = Answer(out, rows)
        return out

    return program


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flash_attn.flash_attn_func(q, k, v, causal=True)
