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

from peers import Prepared, Unsupported
from peers.inputs import Inputs
from workloads import Workload

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

spec = find_spec("vllm")
if spec is None:
    raise ModuleNotFoundError("vllm")
extension = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
(folder,) = spec.submodule_search_locations or ()
torch.ops.load_library(Path(folder) / f"{extension}.abi3.so")


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    if work.head_dim != work.v_head_dim or work.head_dim not in HEAD_DIMS:
        raise Unsupported(f"head dimensions {work.head_dim} and {work.v_head_dim}")
    torch.set_num_threads(num_threads)
    ops, q = torch.ops._C, inputs.q
    isa = "vec"
    if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
        isa = "amx"
    page = work.page_size if work.page_size % 32 == 0 else 128
    pages = [-(-length // page) for length in work.kv_lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int()
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for row, part in zip(table, order.split(pages), strict=True):
        row[: len(part)] = part
    storage = torch.zeros(sum(pages), work.num_kv_heads, 2 * page, work.head_dim, dtype=q.dtype)
    k_cache, v_cache = storage.chunk(2, dim=2)

    def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa, 1.0, 1.0, "auto")

    fresh = []  # keys, values and slots of the new tokens
    sequence = 0
    for batch, (k, v) in zip(inputs.batches(), inputs.gather(), strict=True):
        for i in range(batch.size):
            positions = torch.arange(batch.length)
            slots = table[sequence, positions // page].long() * page + positions % page
            rows = [x[i].transpose(0, 1).contiguous() for x in (k, v)] + [slots]
            write(*rows)
            fresh.append([x[batch.prefix :] for x in rows])
            sequence += 1
    new_tokens = [torch.cat(parts) for parts in zip(*fresh, strict=True)]
    indptr = torch.tensor([0, *accumulate(work.new)], dtype=torch.int32)
    kv_lens = torch.tensor(work.kv_lens, dtype=torch.int32)
    window = -1 if work.window is None else work.window + 1  # counts a token's own key
    out = torch.empty_like(q)

    def stage() -> torch.Tensor:
        write(*new_tokens)
        heads = (work.num_heads, work.num_kv_heads, work.head_dim)
        return ops.get_scheduler_metadata(
            len(pages), *heads, kv_lens, q.dtype, indptr, True, window, isa, True, None, "auto"
        )

    def run(schedule: torch.Tensor) -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            q,
            k_cache,
            v_cache,
            out,
            indptr,
            kv_lens,
            work.scale,
            True,
            None,
            window,
            table,
            0.0,
            schedule,
            None,
            None,
            1.0,
            1.0,
            "auto",
        )
        return out

    return Prepared(run, stage, f"its {isa} kernel")
