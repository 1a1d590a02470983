# SPDX-License-Identifier: Apache-2.0
"""One plan, one metadata, in a forked child, which has no threads of its parent; threads share them
in `tests_cpp/attention/shared_plans_test.cc`, copies are in package/test_values.py."""

import multiprocessing
from typing import Any

import numpy as np
import pytest

import cpattn
from support.time_limits import PATIENCE

RNG = np.random.default_rng(2)
Q, CACHE = (RNG.standard_normal(s, np.float32) for s in ((60, 4, 32), (12, 16, 2, 32)))
WEIGHTS = RNG.standard_normal((60, 4), np.float32)
TABLES = 11 - np.arange(12).reshape(3, 4)
EXTENDS, LENGTHS = [40, 3, 17], [60, 50, 17]


def used(plan: cpattn.AttentionPlan, metadata: cpattn.ContextParallelMetadata) -> list[Any]:
    """Every kernel that takes one, by several threads."""
    rows, pages = len(metadata.local_q_indices), {"block_tables": TABLES, "page_size": 16}
    out = cpattn.do_cp_attn_fia(
        Q[:rows].reshape(rows, -1), CACHE, CACHE, metadata, **pages, num_heads=4, num_kv_heads=2,
        scale=None,
    )  # fmt: skip
    indices = cpattn.sparse.cp_indexer_topk(
        Q[:rows], CACHE[:, :, 0], WEIGHTS[:rows], metadata, **pages, topk=9
    )
    return [*cpattn.run_attention(plan, Q, CACHE, CACHE, return_lse=True), out, indices]


def answer(connection: Any, *shared: Any) -> None:
    connection.send(used(*shared))


# Python warns about any fork of a process with threads; surviving one is the point here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_them() -> None:
    plan = cpattn.plan_attention(
        q_lens=EXTENDS, kv_lens=LENGTHS, block_tables=TABLES, page_size=16, num_pages=12,
        num_heads=4, num_kv_heads=2, head_dim=32, num_threads=2,
    )  # fmt: skip
    shared = plan, cpattn.build_cp_metadata(EXTENDS, LENGTHS, cp_rank=1, cp_size=2)
    expected = used(*shared)  # threads run now
    context: Any = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(there, *shared))
    child.start()
    there.close()
    try:
        assert here.poll(PATIENCE), "the child hangs"
        results = here.recv()
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()
    for result, right, again in zip(results, expected, used(*shared), strict=True):
        assert np.array_equal(result, right)
        assert np.array_equal(again, right)  # here, after the fork
