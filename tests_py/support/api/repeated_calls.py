# SPDX-License-Identifier: Apache-2.0
"""Makes a small call NAME CALLS times; prints how many bytes resident memory and Python's grew."""

import gc
import mmap
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path

import numpy as np

import cpattn
from cpattn.transfer.wire import KVTransferRequest
from support.api.api_calls import targets

WARM_UP = 3000  # calls after which caches and free lists no longer grow
FRAMES = KVTransferRequest(
    room=7, host="10.0.0.1", port=4000, session_id="10.0.0.1:4001",
    page_indices=np.arange(9), aux_index=7, required_count=2,
).to_frames()  # fmt: skip


def good(name: str) -> Callable[[], object]:
    def call() -> Callable[[], object]:
        found = next(target for target in targets() if target.name == name).make()
        values = found.values()
        return lambda: found.function(**values)

    return call


def refused_batch() -> None:
    """Raise errors of the core, of its checks of arguments, and of Python above it."""
    sizes = {"size": 0, "page_size": 0, "num_layers": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 1}
    with suppress(ValueError):
        cpattn.sparse.sglang_0_5_23.fast_topk(np.zeros((2, 9), np.float32), [9], 4)
    with suppress(TypeError):
        cpattn.build_cp_metadata(extend_lens=[1.5], cp_rank=0, cp_size=2)
    with suppress(ValueError):
        cpattn.kv.MLATokenToKVPool(**sizes)


KEPT: list[object] = []
NAMES = ("plan_attention", "paged_attention", "build_cp_metadata", "build_dsa_metadata")
NAMES += ("fast_topk", "set_kv_buffer", "plan_kv_transfer")
CALLS = {name: good(name) for name in NAMES} | {
    "KVTransferRequest": lambda: lambda: KVTransferRequest.from_frames(FRAMES).to_frames(),
    "errors": lambda: refused_batch,
}
LEAKS = {"a leak of one object": lambda: lambda: KEPT.append(object())}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def run(call: Callable[[], object], times: int) -> None:
    for _ in repeat(None, times):
        call()
    gc.collect()


def main() -> None:
    call, times = (CALLS | LEAKS)[sys.argv[1]](), int(sys.argv[2])
    cpattn.set_num_threads(1)
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
