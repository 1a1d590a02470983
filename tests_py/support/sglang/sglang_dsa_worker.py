# SPDX-License-Identifier: Apache-2.0
"""Rank that runs sglang's own indexer, caches and sparse attention of Ascend under context
parallelism. The latents of a `Case` are its K, the rotary part of keys is its V."""

from types import SimpleNamespace
from typing import Any

import torch

from support.distributed.prefill_batches import Batch, Case, make_batch
from support.sglang import sglang_runtime
from support.sglang.sglang_runtime import SGLANG

LAYER_ID, NUM_LAYERS = 1, 2
HIDDEN, Q_LORA, INDEX_HEADS, INDEX_DIM, ROPE_DIM = 32, 32, 4, 64, 32
TOPK = 32
HF_CONFIG = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=TOPK)


def run_cases(rank: int, size: int, cases: list[Case]) -> dict[str, dict]:
    with sglang_runtime.context_parallel(
        rank, size, "zigzag", _model_config=SimpleNamespace(hf_config=HF_CONFIG)
    ):
        return {case.name: run_case(case, size) for case in cases}


@torch.inference_mode()
def run_case(case: Case, cp_size: int) -> dict:
    parallel = SGLANG.runtime.get_parallel()
    split = {"cp_size": cp_size, "cp_strategy": case.strategy}
    SGLANG.cp_base.init_cp_strategy(enable_prefill_cp=True, **split)
    batch = make_batch(case)
    forward_batch = sglang_runtime.make_forward_batch(case, batch)
    backend = make_backend(case, batch)
    indexer = make_indexer(max(case.seq_lens))
    width = case.head_dim + case.v_head_dim
    sizes = {"num_kv_heads": 1, "layer_id": LAYER_ID, "v_head_dim": case.head_dim}
    layer = SGLANG.radix.RadixAttention(case.num_heads, width, width**-0.5, **sizes)
    inputs = make_inputs(case)
    vectors = index_vectors(indexer, case, inputs)
    pool = backend.token_to_kv_pool
    pool.get_index_k_buffer(LAYER_ID).fill_(torch.nan)
    all_slots = sglang_runtime.write_prefixes(pool, layer, case, batch)
    for slots, (_, index_k, _) in zip(all_slots, vectors, strict=True):
        pool.set_index_k_buffer(LAYER_ID, slots, index_k[: len(slots)])
    model = SimpleNamespace(kv_lora_rank=case.head_dim)
    with (
        parallel.override(cp_strategy=case.strategy),
        SGLANG.context.forward_context(SGLANG.context.ForwardContext(backend)),
    ):
        SGLANG.cp.prepare_cp_forward(forward_batch)
        backend.init_forward_metadata(forward_batch)

        def shard(x: torch.Tensor) -> torch.Tensor:
            return SGLANG.cp.cp_shard_hidden_states(x, forward_batch)

        positions = SGLANG.cp.cp_shard_position_ids(forward_batch.positions, forward_batch)
        rows = (
            shard(torch.cat([x[p:] for x, p in zip(all_rows, case.prefixes, strict=True)]))
            for all_rows in (inputs.hidden, inputs.q_lora)
        )
        topk_indices = indexer.forward_npu(*rows, positions, forward_batch, LAYER_ID)
        k, k_rope = (shard(batch.new(case, x)) for x in (batch.k, batch.v))
        k, k_rope = SGLANG.deepseek.DeepseekV2AttentionMLA.rebuild_cp_kv_cache(
            model, torch.cat([k, k_rope], -1).squeeze(1), forward_batch, k, k_rope
        )
        options = {"q_rope": shard(inputs.q_rope), "k_rope": k_rope, "topk_indices": topk_indices}
        out = layer(shard(batch.q), k, k, forward_batch, **options)
        gather = SGLANG.cp.cp_gather_after_forward
        strategy, planned = SGLANG.cp_base.get_cp_strategy(), backend.forward_metadata
        local = strategy.local_q_indices(sum(case.extend_lens), forward_batch)
        return {
            "block_tables": planned.block_tables,
            "actual_seq_lengths_kv": planned.actual_seq_lengths_kv,
            "local_q_indices": local[local < sum(case.extend_lens)],
            "tables": batch.block_tables,
            "index_vectors": vectors,
            "q_rope": inputs.q_rope,
            "topk_indices": gather(topk_indices, forward_batch),
            "out": gather(out.flatten(1), forward_batch).view(len(batch.q), case.num_heads, -1),
        }


def make_inputs(case: Case) -> SimpleNamespace:
    """Return hidden [n, HIDDEN] and q_lora [n, Q_LORA] of each request's tokens, for the indexer,
    and q_rope [T, num_heads, rope] of the new ones."""
    random = torch.Generator().manual_seed(sum(case.seq_lens))

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=random).bfloat16()

    shape = sum(case.extend_lens), case.num_heads, case.v_head_dim
    return SimpleNamespace(
        hidden=[integers(n, HIDDEN) for n in case.seq_lens],
        q_lora=[integers(n, Q_LORA) for n in case.seq_lens],
        q_rope=torch.randn(shape, generator=random).to(case.dtype),
    )


def make_indexer(max_position: int) -> Any:
    """Make sglang's `Indexer` with matrices of -1, 0 and 1, so that bfloat16 holds all products."""
    options = {"hidden_size": HIDDEN, "index_n_heads": INDEX_HEADS, "index_head_dim": INDEX_DIM}
    options |= {"rope_head_dim": ROPE_DIM, "index_topk": TOPK, "q_lora_rank": Q_LORA}
    options |= {"max_position_embeddings": max_position, "rope_theta": 10000, "layer_id": LAYER_ID}
    options |= {"scale_fmt": None}
    indexer = SGLANG.indexer.Indexer(**options)
    random = torch.Generator().manual_seed(3)
    for linear in (indexer.wq_b, indexer.wk, indexer.weights_proj):
        weight = torch.randint(-1, 2, linear.weight.shape, generator=random)
        dtype = torch.float32 if linear is indexer.weights_proj else torch.bfloat16
        linear.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    return indexer


def index_vectors(indexer: Any, case: Case, inputs: SimpleNamespace) -> list[tuple]:
    """Return q [n, heads, dim], k [n, dim] and weights [n, heads] of each request's tokens."""
    vectors = []
    for hidden, q_lora in zip(inputs.hidden, inputs.q_lora, strict=True):
        q = (q_lora @ indexer.wq_b.weight.T).view(-1, INDEX_HEADS, INDEX_DIM)
        k = indexer.k_norm(hidden @ indexer.wk.weight.T)
        weights = (hidden.float() @ indexer.weights_proj.weight.T).bfloat16()
        vectors.append((rotate(indexer, q), rotate(indexer, k[:, None])[:, 0], weights))
    return vectors


def rotate(indexer: Any, x: torch.Tensor) -> torch.Tensor:
    """Rotate the first ROPE_DIM dimensions of x [n, heads, dim] of tokens 0 to n - 1."""
    cos, sin = indexer.rotary_emb.cos_sin_cache[: len(x)].chunk(2, -1)
    cos, sin = (angles.repeat(1, 2)[:, None] for angles in (cos, sin))
    turned = SGLANG.npu_indexer.torch_npu.npu_rotary_mul(x[..., :ROPE_DIM], cos, sin)
    return torch.cat([turned, x[..., ROPE_DIM:]], -1)


def make_backend(case: Case, batch: Batch) -> Any:
    num_pages = len(batch.k_cache) // case.page_size
    options = {"size": (num_pages - 1) * case.page_size, "page_size": case.page_size}
    options |= {"dtype": case.dtype, "kv_lora_rank": case.head_dim}
    options |= {"qk_rope_head_dim": case.v_head_dim, "layer_num": NUM_LAYERS, "device": "cpu"}
    options |= {"enable_memory_saver": False, "index_head_dim": INDEX_DIM}
    pool = SGLANG.npu_pools.NPUMLATokenToKVPool(**options)
    model = {"attention_arch": SGLANG.models.AttentionArch.MLA, "hf_config": HF_CONFIG}
    model |= {"kv_lora_rank": case.head_dim, "qk_nope_head_dim": case.head_dim}
    model |= {"qk_rope_head_dim": case.v_head_dim, "num_attention_heads": case.num_heads}
    return sglang_runtime.make_ascend_backend(case, batch, pool, model)
