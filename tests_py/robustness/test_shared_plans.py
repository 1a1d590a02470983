# SPDX-License-Identifier: Apache-2.0
"""One plan, one metadata, in a forked child and in a spawned one.

Threads that share them are in `tests_cpp/attention/shared_plans_test.cc`.
"""

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
BATCH = {"extend_lens": [40, 3, 17], "seq_lens": [60, 50, 17]}


def plan() -> cpattn.AttentionPlan:
    return cpattn.plan_attention(
        q_lens=BATCH["extend_lens"], kv_lens=BATCH["seq_lens"], block_tables=TABLES, page_size=16,
        num_pages=12, num_heads=4, num_kv_heads=2, head_dim=32, num_threads=2,
    )  # fmt: skip


def run_plan(plan: cpattn.AttentionPlan) -> Any:
    return [
        *cpattn.run_attention(plan, Q, CACHE, CACHE, return_lse=True),
        plan.items,
        plan.page_ids,
    ]


def zigzag() -> cpattn.ContextParallelMetadata:
    return cpattn.build_cp_metadata(**BATCH, cp_rank=1, cp_size=2)


def interleave() -> cpattn.ContextParallelMetadata:
    return cpattn.build_cp_metadata(**BATCH, cp_rank=1, cp_size=2, strategy="interleave")


def use_metadata(metadata: cpattn.ContextParallelMetadata) -> Any:
    """Every kernel that takes one, and all that is computed when it is asked for."""
    rows = len(metadata.local_q_indices)
    out = cpattn.do_cp_attn_fia(
        Q[:rows].reshape(rows, -1), CACHE, CACHE, metadata, block_tables=TABLES, page_size=16,
        num_heads=4, num_kv_heads=2, scale=None,
    )  # fmt: skip
    indices = cpattn.sparse.cp_indexer_topk(
        Q[:rows], CACHE[:, :, 0], WEIGHTS[:rows], metadata, block_tables=TABLES, page_size=16,
        topk=9,
    )  # fmt: skip
    physical = metadata.pad_to_physical()
    parts = [metadata.shard(Q), physical.shard(Q)]
    return [out, indices, *parts, repr(metadata), metadata.to_dict(), physical.to_dict()]


def dsa_metadata() -> cpattn.sparse.DsaMetadata:
    return cpattn.sparse.build_dsa_metadata(
        **BATCH, forward_mode=cpattn.ForwardMode.EXTEND, topk=9, fp8_kv_cache=True,
        prefill_impl="flashmla_sparse", cp_metadata=interleave(),
    )  # fmt: skip


def use_dsa_metadata(metadata: cpattn.sparse.DsaMetadata) -> Any:
    rows = len(metadata.ks)
    keys = CACHE.reshape(-1, 32)
    arguments = Q[:rows], keys, WEIGHTS[:rows], metadata.ks, metadata.ke
    logits = cpattn.sparse.indexer_logits(*arguments)
    ragged = cpattn.sparse.topk_transform(
        logits, 9, method=metadata.topk_transform_method, lengths=metadata.seqlens_expanded,
        row_starts=metadata.ks, topk_indices_offset=metadata.topk_indices_offset,
    )  # fmt: skip
    return [
        cpattn.sparse.indexer_topk(*arguments, topk=9),
        ragged,
        metadata.to_dict(),
        repr(metadata),
    ]


PLANS = [
    (plan, run_plan),
    (zigzag, use_metadata),
    (interleave, use_metadata),
    (dsa_metadata, use_dsa_metadata),
]


def are_equal(result: list[Any], expected: list[Any]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(result, expected, strict=True))


def answer(connection: Any, uses: list[Any], plans: list[Any]) -> None:
    connection.send([use(shared) for use, shared in zip(uses, plans, strict=True)])


# Python warns about any fork of a process with threads; surviving one is the point here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_has_all_of_them(method: str) -> None:
    uses = [use for _, use in PLANS]
    plans = [make() for make, _ in PLANS]
    expected = [use(shared) for use, shared in zip(uses, plans, strict=True)]  # threads run now
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(there, uses, plans))
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
    for result, right, use, shared in zip(results, expected, uses, plans, strict=True):
        assert are_equal(result, right)
        assert are_equal(use(shared), right)  # here, after the fork
