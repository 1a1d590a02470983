# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention on its own cache, which packs keys when they are written.

Writing the new tokens and the division of work are timed, because every step of the engine has
them. The extension is loaded without vLLM's Python, most of whose requirements are not needed here.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import torch

from bench.attention.peers import Kept, Prepared, Unsupported
from bench.attention.peers.inputs import Inputs
from bench.attention.workloads import Workload

KEPT = Kept()
PART = 1 << 14  # tokens that are written at a time, beforehand
#: By the dtype of codes. Whatever else it has, it has no int8.
CACHE_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
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
    if work.kv_dtype and (work.kv_dtype not in CACHE_DTYPES or work.kv_scale != "tensor"):
        raise Unsupported(f"a cache of {work.kv_dtype} with a scale for each {work.kv_scale}")
    torch.set_num_threads(num_threads)
    q, heads = inputs.q, (work.num_heads, work.num_kv_heads, work.head_dim)
    isa = "vec"
    if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
        isa = "amx"
    cache: Cache = KEPT.get(inputs.k_cache, lambda: Cache(inputs, isa))
    new_tokens = cache.new_tokens(inputs)
    indptr = torch.tensor([0, *accumulate(work.new)], dtype=torch.int32)
    kv_lens = torch.tensor(work.kv_lens, dtype=torch.int32)
    window = -1 if work.window is None else work.window + 1  # counts a token's own key
    slopes = inputs.slopes
    out = torch.empty_like(q)

    def stage() -> torch.Tensor:
        cache.write(*new_tokens)
        return ops.get_scheduler_metadata(
            len(kv_lens),
            *heads,
            kv_lens,
            q.dtype,
            indptr,
            True,
            window,
            isa,
            True,
            None,
            cache.dtype,
        )

    def run(schedule: torch.Tensor) -> torch.Tensor:
        lengths = (indptr, kv_lens)
        masking = (True, slopes, window)
        rest = (0.0, schedule, None, None, *cache.scales, cache.dtype)  # no softcap, no sinks
        ops.cpu_attention_with_kv_cache(
            q, cache.k, cache.v, out, *lengths, work.scale, *masking, cache.table, *rest
        )
        return out

    return Prepared(run, stage, f"its {isa} kernel")


class Cache:
    """K and V in the kernel's own order, in shuffled pages of their own."""

    def __init__(self, inputs: Inputs, isa: str) -> None:
        work = inputs.work
        self.isa = isa
        self.dtype = CACHE_DTYPES[work.kv_dtype] if work.kv_dtype else "auto"
        self.scales = [1.0 if x is None else x.item() for x in (inputs.k_scale, inputs.v_scale)]
        self.page_size = work.page_size if work.page_size % 32 == 0 else 128
        pages = [-(-length // self.page_size) for length in work.stored_lens]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int()
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, part in zip(self.table, order.split(pages), strict=True):
            row[: len(part)] = part
        shape = (sum(pages), work.num_kv_heads, 2 * self.page_size, work.head_dim)
        stored = torch.uint8 if work.kv_dtype else inputs.q.dtype
        self.k, self.v = torch.zeros(shape, dtype=stored).chunk(2, dim=2)
        for i, length in enumerate(work.stored_lens):
            for begin in range(0, length, PART):
                self.write(*self.rows(inputs, i, begin, min(begin + PART, length)))

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        options = (slots, self.isa, *self.scales, self.dtype)
        ops.cpu_attn_reshape_and_cache(k, v, self.k, self.v, *options)

    def rows(self, inputs: Inputs, sequence: int, begin: int, end: int) -> list[torch.Tensor]:
        """Keys, values and slots of some tokens of a sequence."""
        positions = torch.arange(begin, end)
        pages = self.table[sequence][positions // self.page_size].long()
        slots = pages * self.page_size + positions % self.page_size
        return [*(x.contiguous() for x in inputs.tokens(sequence, begin, end)), slots]

    def new_tokens(self, inputs: Inputs) -> list[torch.Tensor]:
        """The keys, values and slots of the new tokens, for every step."""
        work = inputs.work
        fresh = [
            self.rows(inputs, i, prefix, prefix + new)
            for i, (new, prefix) in enumerate(zip(work.new, work.prefix, strict=True))
        ]
        return [torch.cat(parts) for parts in zip(*fresh, strict=True)]
