# SPDX-License-Identifier: Apache-2.0
"""The functions of the folder for Hugging Face's `kernels`, with transformers' arguments.

The Hub's own kernel for CPUs is not on PyPI; torch's `scaled_dot_product_attention` on the same
tensors takes its place.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.harness.comparison import Comparison, times_as_fast
from bench.transformers import THREADS
from bench.transformers.models import OURS, PEER, Agreement

_SCRIPT = Path(__file__).parents[2] / "scripts" / "build_hub_kernel.py"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

Attend = Callable[[], torch.Tensor]


def comparisons(quick: bool) -> Iterator[Comparison]:
    for batch, tokens in ((2, 24),) if quick else ((1, 2048), (1, 8192), (8, 512)):
        yield comparison("flash_attn", [tokens] * batch, *of_batch(batch, tokens))
    lens = [15, 8, 1] if quick else [1600, 800, 400, 200]
    yield comparison("flash_attn_varlen", lens, *of_ragged(lens))


def comparison(job: str, lens: list[int], ours: Attend, peer: Attend) -> Comparison:
    pairs = sum(n * (n + 1) // 2 for n in lens)
    return Comparison(
        "hub_kernel",
        {"job": job, "batch": len(lens), "tokens": sum(lens), "threads": THREADS},
        {OURS: rows_of(ours), PEER: rows_of(peer)},
        Agreement("layer"),
        (4e-9 * pairs * HEADS * HEAD_DIM, "GFLOP"),
        (sum(lens), "token"),
        (times_as_fast(OURS, PEER, 1, PEER),),
    )


def of_batch(batch: int, tokens: int) -> tuple[Attend, Attend]:
    q, k, v = rows(batch, tokens)
    return (lambda: kernel().flash_attn_func(q, k, v, causal=True)), (lambda: sdpa(q, k, v))


def of_ragged(lens: list[int]) -> tuple[Attend, Attend]:
    """The peer takes one sequence after the other."""
    q, k, v = (tensor[0] for tensor in rows(1, sum(lens)))
    offsets = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
    ragged = (offsets, offsets, max(lens), max(lens))

    def peer() -> torch.Tensor:
        sequences = zip(*(tensor[None].split(lens, dim=1) for tensor in (q, k, v)), strict=True)
        return torch.cat([sdpa(*sequence)[0] for sequence in sequences])

    return (lambda: kernel().flash_attn_varlen_func(q, k, v, *ragged, causal=True)), peer


def rows(batch: int, tokens: int) -> list[torch.Tensor]:
    """q, k and v, bfloat16 [batch, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(batch, tokens, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def rows_of(attend: Attend) -> Attend:
    """The rows of the result, one for each token, without gradients."""

    def run() -> torch.Tensor:
        with torch.inference_mode():
            return attend().flatten(-2).flatten(0, -2)

    return run


@cache
def kernel() -> Any:
    """The package of the folder that `kernels` would load, on the threads of torch."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_SCRIPT), "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob("build/*/__init__.py")
        spec = importlib.util.spec_from_file_location("cpattn_of_the_hub", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module
