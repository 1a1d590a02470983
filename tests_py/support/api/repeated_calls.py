# SPDX-License-Identifier: Apache-2.0
"""Makes one small call so many times, and prints by how many bytes the process grew.

python -m support.api.repeated_calls NAME CALLS: resident memory, then memory that Python knows of
"""

from __future__ import annotations

import gc
import mmap
import sys
import tracemalloc
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import numpy as np

import cpattn
from cpattn import transfer
from cpattn.transfer.wire import KVTransferRequest

WARM_UP = 3000  # calls after which caches and free lists are as large as they become
RNG = np.random.default_rng(0)
Q, CACHE = (
    RNG.standard_normal((2, 2, 16), np.float32),
    RNG.standard_normal((4, 4, 1, 16), np.float32),
)
PLAN = cpattn.plan_attention(
    q_lens=[1, 1], kv_lens=[5, 7], block_tables=[[0, 1], [3, 2]], page_size=4, num_pages=4,
    num_heads=2, num_kv_heads=1, head_dim=16, num_threads=1,
)  # fmt: skip
OUT = np.empty_like(Q)
SCORE = RNG.standard_normal((2, 40), np.float32)
LAYOUTS = [
    transfer.KVLayout([transfer.KVEntry(0, "k", False, base << 48, 64 * 512, 512)], 16)
    for base in (1, 2)
]
POOL = cpattn.kv.MHATokenToKVPool(
    size=16,
    page_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=16,
    dtype="float32",
    container="numpy",
)
FRAMES = KVTransferRequest(
    room=7, host="10.0.0.1", port=4000, session_id="10.0.0.1:4001",
    page_indices=np.arange(9), aux_index=7, required_count=2,
).to_frames()  # fmt: skip


def refuse(function: Callable[..., object], **arguments: object) -> None:
    try:
        function(**arguments)
    except (ValueError, TypeError):
        return
    raise AssertionError(f"{function.__name__} took {arguments}")


def refused_batch() -> None:
    """Errors of the core, of its checks of arguments, and of Python above it."""
    refuse(cpattn.run_attention, plan=PLAN, q=Q[:1], k_cache=CACHE, v_cache=CACHE, out=OUT)
    refuse(cpattn.build_cp_metadata, extend_lens=[1.5], cp_rank=0, cp_size=2)
    refuse(cpattn.kv.MLATokenToKVPool, size=0, page_size=0, num_layers=1, kv_lora_rank=1,
           qk_rope_head_dim=1)  # fmt: skip


CALLS: dict[str, Callable[[], object]] = {
    "plan_attention": lambda: cpattn.plan_attention(
        q_lens=[1, 1], kv_lens=[5, 7], block_tables=[[0, 1], [3, 2]], page_size=4, num_pages=4,
        num_heads=2, num_kv_heads=1, head_dim=16,
    ).items,
    "run_attention": lambda: cpattn.run_attention(PLAN, Q, CACHE, CACHE, return_lse=True),
    "run_attention, into out": lambda: cpattn.run_attention(PLAN, Q, CACHE, CACHE, out=OUT),
    "paged_attention": lambda: cpattn.paged_attention(
        Q, CACHE, CACHE, q_lens=[1, 1], kv_lens=[5, 7], block_tables=[[0, 1], [3, 2]]
    ),
    "build_cp_metadata": lambda: cpattn.build_cp_metadata(
        [30, 20], [50, 20], cp_rank=1, cp_size=2
    ).kv_len_prev_tensor,
    "build_dsa_metadata": lambda: cpattn.sparse.build_dsa_metadata(
        [3, 2], [10, 4], forward_mode=cpattn.ForwardMode.EXTEND, topk=8, fp8_kv_cache=True,
        prefill_impl="flashmla_sparse",
    ).ks,
    "fast_topk": lambda: cpattn.sparse.fast_topk(SCORE, [40, 30], 8),
    "set_kv_buffer": lambda: POOL.set_kv_buffer(0, [3, 9], Q[0], Q[1]),
    "plan_kv_transfer": lambda: transfer.plan_kv_transfer(*LAYOUTS, [7, 2, 3], [1, 20, 21]).lengths,
    "KVTransferRequest": lambda: KVTransferRequest.from_frames(FRAMES).to_frames(),
    "errors": refused_batch,
}  # fmt: skip

KEPT: list[object] = []
LEAKS: dict[str, Callable[[], object]] = {"a leak of one object": lambda: KEPT.append(object())}


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def run(call: Callable[[], object], times: int) -> None:
    for _ in repeat(None, times):
        call()
    gc.collect()


def main() -> None:
    call, times = (CALLS | LEAKS)[sys.argv[1]], int(sys.argv[2])
    run(call, WARM_UP)
    before = resident()
    run(call, times)
    grown = resident() - before
    tracemalloc.start()
    run(call, WARM_UP)
    traced = tracemalloc.get_traced_memory()[0]
    run(call, times // 10)
    print(grown, tracemalloc.get_traced_memory()[0] - traced)


if __name__ == "__main__":
    main()
