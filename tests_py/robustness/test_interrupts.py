# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends every call that may be long within a second, on one thread and on several.

Each call here would take many seconds or minutes, in a process of its own. What it reads is
memory of zeros, most of which is never touched.
"""

from __future__ import annotations

import pytest

from support.interrupts import assert_interruptible

pytestmark = pytest.mark.slow


SCRIPT = """
import numpy as np, cpattn
cpattn.set_num_threads({threads})

def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)

{prepare}
print("ready", flush=True)
while True:  # calls that end before the signal comes are made again
    {call}
"""

TOKENS = 30_000
CACHE = f"cache = zeros(1, {TOKENS}, 1, 128); q = zeros({TOKENS}, 32, 128)"
SPARSE = (
    "kv = zeros(4096, 1, 576); q = zeros(2000, 128, 576); "
    "indices = np.broadcast_to(np.arange(2048, dtype=np.int32), (2000, 1, 2048)).copy()"
)

CALLS = {
    "run_attention": (
        f"{CACHE}; plan = cpattn.plan_attention(q_lens=[{TOKENS}], kv_lens=[{TOKENS}], "
        f"block_tables=[[0]], page_size={TOKENS}, num_pages=1, num_heads=32, num_kv_heads=1, "
        "head_dim=128)",
        "cpattn.run_attention(plan, q, cache, cache)",
    ),
    "do_cp_attn_fia": (
        f"{CACHE}; metadata = cpattn.build_cp_metadata([{TOKENS}], cp_rank=0, cp_size=1)",
        f"cpattn.do_cp_attn_fia(q.reshape({TOKENS}, -1), cache, cache, metadata, "
        f"block_tables=[[0]], page_size={TOKENS}, num_heads=32, num_kv_heads=1, scale=1.0)",
    ),
    "npu_fused_infer_attention_score": (
        CACHE,
        "cpattn.npu.npu_fused_infer_attention_score(q[None], cache, cache, num_heads=32, "
        "num_key_value_heads=1, input_layout='BSND')",
    ),
    "flash_mla_sparse_fwd": (SPARSE, "cpattn.sparse.flash_mla_sparse_fwd(q, kv, indices, 0.1)"),
    "npu_sparse_flash_attention": (
        f"{SPARSE}; kv = kv[None]; q = q[None]; indices = indices[None]",
        "cpattn.npu.npu_sparse_flash_attention(q, kv, kv[..., :512], indices, 0.1, sparse_mode=0)",
    ),
    "indexer_topk": (
        f"q = zeros({TOKENS}, 16, 128); k = zeros({TOKENS}, 128); weights = zeros({TOKENS}, 16); "
        f"ks = np.zeros({TOKENS}, np.int32)",
        f"cpattn.sparse.indexer_topk(q, k, weights, ks, ks + {TOKENS}, topk=64)",
    ),
    "npu_lightning_indexer": (
        f"q = zeros(1, {TOKENS}, 16, 128); k = zeros(1, {TOKENS}, 1, 128); "
        f"weights = zeros(1, {TOKENS}, 16)",
        "cpattn.npu.npu_lightning_indexer(q, k, weights)",
    ),
    "indexer_logits": (
        "q = zeros(8192, 64, 128); k = zeros(8192, 128); weights = zeros(8192, 64); "
        "ks = np.zeros(8192, np.int32); ke = ks + 8192",
        "cpattn.sparse.indexer_logits(q, k, weights, ks, ke)",
    ),
    "cp_indexer_topk": (
        f"q = zeros({TOKENS}, 16, 128); cache = zeros(1, {TOKENS}, 128); "
        f"weights = zeros({TOKENS}, 16); "
        f"metadata = cpattn.build_cp_metadata([{TOKENS}], cp_rank=0, cp_size=1)",
        f"cpattn.sparse.cp_indexer_topk(q, cache, weights, metadata, block_tables=[[0]], "
        f"page_size={TOKENS}, topk=64)",
    ),
    "fast_topk": (
        "score = np.tile(np.random.default_rng(0).standard_normal(60000, np.float32), (1000, 1)); "
        "lengths = [60000] * 1000",
        "cpattn.sparse.fast_topk(score, lengths, 2048)",
    ),
    "hadamard_transform": ("x = zeros(100_000, 512)", "cpattn.sparse.hadamard_transform(x)"),
    "quantize_kv_rows": (
        "nope, rope = zeros(100_000, 512), zeros(100_000, 64)",
        "cpattn.sparse.quantize_kv_rows(nope, rope)",
    ),
    "split_qk_norm": (
        "x, q, k = zeros(200_000, 1600), zeros(1024), zeros(512)",
        "cpattn.sparse.split_qk_norm(x, q, k, 1024, 512, 64, q_eps=1e-6, kv_eps=1e-6)",
    ),
    "build_cp_metadata_all_ranks": (
        "lens = [50_000] * 2000",
        "cpattn.build_cp_metadata_all_ranks(lens, cp_size=1024)",
    ),
    "reference.indexer_logits": (
        "q = zeros(3000, 16, 64); k = zeros(20_000, 64); weights = zeros(3000, 16); "
        "ks = np.zeros(3000, np.int32)",
        "cpattn.reference.indexer_logits(q, k, weights, ks, ks + 20_000)",
    ),
    "reference.flash_mla_sparse_fwd": (
        "q = zeros(4000, 16, 64); kv = zeros(5000, 1, 64); "
        "indices = np.zeros((4000, 1, 2048), np.int32)",
        "cpattn.reference.flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=64)",
    ),
    "reference.paged_attention": (
        "q, cache = zeros(4000, 8, 64), zeros(1, 4000, 1, 64)",
        "cpattn.reference.paged_attention(q, cache, cache, q_lens=[4000], kv_lens=[4000], "
        "block_tables=[[0]])",
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_the_call(name, threads):
    prepare, call = CALLS[name]
    assert_interruptible(SCRIPT.format(threads=threads, prepare=prepare, call=call))
