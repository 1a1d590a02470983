# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention on its own cache, in which keys are packed as they are written.

Counted: writing the new tokens and the division of work, both part of every step of the engine.
The extension is loaded without vLLM's Python, most of whose requirements are not needed here.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch

from bench.attention.peers import Prepared, Unsupported
from bench.attention.peers.inputs import Inputs
from bench.attention.workloads import Workload

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

spec = find_spec("vllm")
if spec is None or spec.submodule_search_locations is None:
    raise ModuleNotFoundError("vllm")
extension = "_C_AVX2"  # of its three builds the one that vLLM takes on such a processor
if torch.cpu._is_avx512_supported():
    extension = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
(folder,) = spec.submodule_search_locations
torch.ops.load_library(Path(folder) / f"{extension}.abi3.so")
ops = torch.ops._C


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    if work.head_dim != work.v_head_dim or work.head_dim not in HEAD_DIMS:
        raise Unsupported(f"head dimensions {work.head_dim} and {work.v_head_dim}")
    torch.set_num_threads(num_threads)
    q, heads = inputs.q, (work.num_heads, work.num_kv_heads, work.head_dim)
    isa = "vec"
    if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
        isa = "amx"
    cache = Cache(work, q.dtype, isa)
    new_tokens = cache.fill(inputs)
    indptr = torch.tensor([0, *accumulate(work.new)], dtype=torch.int32)
    kv_lens = torch.tensor(work.kv_lens, dtype=torch.int32)
    window = -1 if work.window is None else work.window + 1  # counts a token's own key
    out = torch.empty_like(q)

    def stage() -> torch.Tensor:
        cache.write(*new_tokens)
        return ops.get_scheduler_metadata(
            len(kv_lens), *heads, kv_lens, q.dtype, indptr, True, window, isa, True, None, "auto"
        )

    def run(schedule: torch.Tensor) -> torch.Tensor:
        lengths = (indptr, kv_lens)
        masking = (True, None, window)  # causal, no ALiBi
        rest = (0.0, schedule, None, None, 1.0, 1.0, "auto")  # no softcap, no sinks
        ops.cpu_attention_with_kv_cache(
            q, cache.k, cache.v, out, *lengths, work.scale, *masking, cache.table, *rest
        )
        return out

    return Prepared(run, stage, f"its {isa} kernel")


class Cache:
    """K and V in the kernel's own order, in shuffled pages of their own."""

    def __init__(self, work: Workload, dtype: torch.dtype, isa: str) -> None:
        self.isa = isa
        self.page_size = work.page_size if work.page_size % 32 == 0 else 128
        pages = [-(-length // self.page_size) for length in work.kv_lens]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int()
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, part in zip(self.table, order.split(pages), strict=True):
            row[: len(part)] = part
        shape = (sum(pages), work.num_kv_heads, 2 * self.page_size, work.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=dtype).chunk(2, dim=2)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(k, v, self.k, self.v, slots, self.isa, 1.0, 1.0, "auto")

    def fill(self, inputs: Inputs) -> list[torch.Tensor]:
        """Write all tokens; the keys, values and slots of the new ones, for every step."""
        fresh = []
        tables = iter(self.table)
        for batch, (k, v) in zip(inputs.batches(), inputs.gather(), strict=True):
            positions = torch.arange(batch.length)
            for i in range(batch.size):
                pages = next(tables)[positions // self.page_size].long()
                slots = pages * self.page_size + positions % self.page_size
                rows = [*(x[i].transpose(0, 1).contiguous() for x in (k, v)), slots]
                self.write(*rows)
                fresh.append([x[batch.prefix :] for x in rows])
        return [torch.cat(parts) for parts in zip(*fresh, strict=True)]
