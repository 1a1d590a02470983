# SPDX-License-Identifier: Apache-2.0
"""Threads that share arguments and objects each get the results that they would get alone.

On a CPython without the GIL, several threads are within the bindings at once, too.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import eq

import numpy as np

import cpattn
from cpattn.kv import MHATokenToKVPool, StripedAllocator
from cpattn.transfer import (
    KVLayout,
    LocalEngine,
    TransferPlan,
    plan_kv_transfer,
    register,
    registration,
)
from cpattn.transfer.sglang_0_5_23 import kv_to_page_indices

THREADS = 4
ROUNDS = 50


def together(*work: Callable[[], None]) -> None:
    """Run each on a thread of its own, all at once, and raise an error of any."""
    begin = threading.Barrier(len(work))

    def one(run: Callable[[], None]) -> None:
        begin.wait(60)
        run()

    with ThreadPoolExecutor(len(work)) as pool:
        list(pool.map(one, work))


def calls() -> list[Callable[[], object]]:
    """Return calls of all kinds, which have the same arguments each time."""
    rng = np.random.default_rng(0)
    k_cache, v_cache = (rng.standard_normal((20, 16, 2, 64), np.float32) for _ in range(2))
    q = rng.standard_normal((38, 8, 64), np.float32)
    batch = {"q_lens": [33, 5], "kv_lens": [80, 5], "block_tables": [[4, 9, 1, 17, 3], [11]]}
    sizes = {"page_size": 16, "num_pages": 20, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    plan = cpattn.plan_attention(**batch, **sizes)
    metadata = cpattn.build_cp_metadata([200, 14], [300, 14], cp_rank=1, cp_size=4)
    index = [rng.standard_normal(shape, np.float32) for shape in ((7, 4, 64), (300, 64), (7, 4))]
    pool = MHATokenToKVPool(
        size=64, page_size=8, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"
    )
    layout, pages = KVLayout.from_pool(pool), [3, 4, 5, 1]
    return [
        lambda: cpattn.paged_attention(q, k_cache, v_cache, page_size=16, **batch),
        lambda: cpattn.run_attention(plan, q, k_cache, v_cache),
        lambda: cpattn.plan_attention(**batch, **sizes) == plan,
        lambda: cpattn.sparse.indexer_topk(*index, [0] * 7, [300] * 7, topk=32),
        metadata.to_dict,
        lambda: metadata.pad_to_physical().query_cache_lengths,
        lambda: cpattn.build_cp_metadata_all_ranks([9] * 100, [700] * 100, cp_size=8),
        lambda: plan_kv_transfer(layout, layout, pages, pages[::-1]).src_addrs,
    ]


def test_shared_arguments():
    wanted = [(call, call()) for call in calls()]

    def work() -> None:
        for _ in range(ROUNDS):
            for call, result in wanted:
                equal = np.array_equal if isinstance(result, np.ndarray) else eq
                assert equal(call(), result)

    together(*[work] * THREADS)


def test_a_list_that_another_thread_changes():
    """A call reads a list as it is at one moment."""
    whole = list(range(1 << 20, (1 << 20) + 64))  # its ints are freed with the list
    slots, ended = [*whole], threading.Event()

    def change() -> None:
        while not ended.is_set():
            del slots[32:]
            slots[32:] = list(range(whole[32], whole[-1] + 1))

    def read() -> None:
        try:
            for _ in range(60 * ROUNDS):
                pages = kv_to_page_indices(slots, 1).tolist()
                assert pages in (whole, whole[:32])
        finally:
            ended.set()

    together(change, read, read)


def test_one_allocator():
    """No slot belongs to two threads."""
    allocator = StripedAllocator(1 << 12, page_size=4, shard_size=2)
    free, taken, lock = allocator.available_size(), set(), threading.Lock()

    def work() -> None:
        for _ in range(6 * ROUNDS):
            slots = allocator.alloc_extend([0, 0], [10, 40], [None, None])
            assert slots is not None
            mine = {*slots.tolist()}
            with lock:
                assert not mine & taken
                taken.update(mine)
            with lock:
                taken.difference_update(mine)
            allocator.free(slots)

    together(*[work] * THREADS)
    assert allocator.available_size() == free


def test_one_engine():
    """Memory that a thread registers is held until the thread lets go."""
    with LocalEngine() as sender, LocalEngine() as receiver:

        def work() -> None:
            for _ in range(ROUNDS // 5):
                source, target = np.arange(64), np.zeros(64, int)
                with register(sender, source), register(receiver, target):
                    addrs = [source.ctypes.data], [target.ctypes.data]
                    TransferPlan(*addrs, [source.nbytes]).execute(sender, receiver.session_id)
                np.testing.assert_array_equal(target, source)

        together(*[work] * THREADS)
        held = [registration._held[id(engine)] for engine in (sender, receiver)]
        assert held == [{}, {}]
