# SPDX-License-Identifier: Apache-2.0
"""Rank that runs sglang's own context-parallel attention of Ascend: this library provides the
operators of the NPU and, in a second run, the metadata of the plug-in."""

from types import SimpleNamespace
from typing import Any

import torch

import cpattn
from cpattn.integrations import sglang as plug_in
from support.distributed.prefill_batches import Batch, Case, make_batch
from support.sglang import sglang_runtime
from support.sglang.sglang_runtime import SGLANG

LAYER_ID, NUM_LAYERS = 1, 2


def run_cases(rank: int, size: int, cases: list[Case], unsplit: dict[str, Case]) -> dict[str, dict]:
    with sglang_runtime.context_parallel(rank, size, "zigzag"):
        answers = {case.name: run_case(case) for case in cases}
        plug_in.install("metadata")
        for case in cases:
            answers[case.name]["with the plug-in"] = run_case(case)
        plug_in.uninstall()
        return answers | {case.name: run_unsplit(case, mode) for mode, case in unsplit.items()}


def begin(case: Case) -> tuple[Batch, Any, Any, Any]:
    """Return a batch, a backend with the cached prefixes, a forward pass and a layer."""
    batch = make_batch(case)
    backend, forward_batch = (
        make_backend(case, batch),
        sglang_runtime.make_forward_batch(case, batch),
    )
    sizes = case.num_heads, case.head_dim, case.head_dim**-0.5, case.num_kv_heads
    layer = SGLANG.radix.RadixAttention(*sizes, LAYER_ID, v_head_dim=case.v_head_dim)
    sglang_runtime.write_prefixes(backend.token_to_kv_pool, layer, case, batch)
    return batch, backend, forward_batch, layer


@torch.inference_mode()
def run_unsplit(case: Case, mode: str) -> dict:
    """Run a forward pass that sglang does not split: each rank computes all of it."""
    batch, backend, forward_batch, layer = begin(case)
    forward_batch.forward_mode = SGLANG.batch.ForwardMode[mode]
    forward_batch.global_num_token_non_padded_cpu = len(batch.q)
    with SGLANG.context.forward_context(SGLANG.context.ForwardContext(backend)):
        assert not SGLANG.cp.is_cp_active(forward_batch)
        backend.init_forward_metadata(forward_batch)
        k, v = batch.new(case, batch.k), batch.new(case, batch.v)
        out = layer(batch.q.flatten(1), k, v, forward_batch)
    return {"out": out.view(len(batch.q), case.num_heads, -1)}


@torch.inference_mode()
def run_case(case: Case) -> dict:
    """Run one layer of a prefill like sglang's model runner; return the results of this rank."""
    batch, backend, forward_batch, layer = begin(case)
    with SGLANG.context.forward_context(SGLANG.context.ForwardContext(backend)):
        SGLANG.cp.prepare_cp_forward(forward_batch)
        backend.init_forward_metadata(forward_batch)
        q, k, v = (
            SGLANG.cp.cp_shard_hidden_states(x, forward_batch)
            for x in (batch.q.flatten(1), batch.new(case, batch.k), batch.new(case, batch.v))
        )
        out = layer(q, k, v, forward_batch)
        whole = SGLANG.cp.cp_gather_after_forward(out, forward_batch)
    metadata = forward_batch.attn_cp_metadata
    plans = metadata.kv_len_prev_tensor, metadata.kv_len_next_tensor
    pool = backend.token_to_kv_pool
    return {
        "out": whole.unflatten(1, (case.num_heads, -1)),
        "local": out,
        "ours": attend(case, batch, q, pool),
        "plans_are_one_block": len({x.untyped_storage().data_ptr() for x in plans}) == 1,
        "num_rows": metadata.total_q_prev_tokens + metadata.total_q_next_tokens,
        "k_cache": pool.get_key_buffer(LAYER_ID).flatten(0, 1),
        "v_cache": pool.get_value_buffer(LAYER_ID).flatten(0, 1),
    }


def attend(case: Case, batch: Batch, q: torch.Tensor, pool: Any) -> torch.Tensor:
    """Attend by this library alone: rows [num_rows, num_heads * v_head_dim]."""
    parallel = SGLANG.runtime.get_parallel()
    rank = {"cp_rank": parallel.attn_cp_rank, "cp_size": parallel.attn_cp_size}
    metadata = cpattn.build_cp_metadata(case.extend_lens, case.seq_lens, **rank)
    caches = pool.get_key_buffer(LAYER_ID), pool.get_value_buffer(LAYER_ID)
    options = {"block_tables": batch.block_tables, "page_size": case.page_size}
    options |= {"num_heads": case.num_heads, "num_kv_heads": case.num_kv_heads}
    return cpattn.do_cp_attn_fia(q, *caches, metadata, scale=case.head_dim**-0.5, **options)


def make_backend(case: Case, batch: Batch) -> Any:
    num_pages = len(batch.k_cache) // case.page_size
    sizes = {"page_size": case.page_size, "layer_num": NUM_LAYERS, "head_num": case.num_kv_heads}
    sizes |= {"head_dim": case.head_dim, "v_head_dim": case.v_head_dim}
    where = {"dtype": case.dtype, "device": "cpu", "enable_memory_saver": False}
    num_tokens = (num_pages - 1) * case.page_size  # the pool adds a page for padding
    pool = SGLANG.npu_pools.NPUMHATokenToKVPool(size=num_tokens, **sizes, **where)
    model = {
        "attention_arch": SGLANG.models.AttentionArch.MHA,
        "hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
    }
    return sglang_runtime.make_ascend_backend(case, batch, pool, model)
