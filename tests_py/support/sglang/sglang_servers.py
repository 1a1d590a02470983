# SPDX-License-Identifier: Apache-2.0
"""KV pools of the installed sglang, made by its own configurator for a model, and what its own
managers send from one to another."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cpattn.proof.linting.adapters.transfers import from_transfer, memory_of_pool
from support.sglang import sglang_planning
from support.sglang.sglang_upstream import ImmediateExecutor, make_manager
from support.stand_ins import stand_ins_for_what_lacks

PAGE_SIZE, NUM_TOKENS = 16, 128
MODULES = {
    "configurator": "sglang.srt.mem_cache.kv_cache_configurator",
    "npu_pools": "sglang.srt.hardware_backend.npu.memory_pool_npu",
}


@functools.cache
def load() -> SimpleNamespace:
    """The modules of `sglang_planning`, and those that make pools."""
    planning = sglang_planning.load()
    with stand_ins_for_what_lacks():
        modules = {key: importlib.import_module(name) for key, name in MODULES.items()}
    return SimpleNamespace(**vars(planning), **modules)


def configured(sglang: SimpleNamespace) -> Any:
    """A published configuration, of which pools read the size of a page."""
    return sglang.runtime.get_context().override_server_args(page_size=PAGE_SIZE)


def configurator_of(
    sglang: SimpleNamespace, layers: range, *, head_dim: int, v_head_dim: int, num_kv_heads: int = 2
) -> Any:
    """A `KVCacheConfigurator` for some layers of a model, with no more than its builders of plain
    pools read."""
    made = object.__new__(sglang.configurator.KVCacheConfigurator)
    counts = {"start_layer": layers.start, "end_layer": layers.stop}
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    model = SimpleNamespace(get_num_kv_heads=lambda *_: num_kv_heads, **dims)
    numbers = SimpleNamespace(num_effective_layers=len(layers), **counts)
    fields = {"device": "cpu", "kv_cache_dtype": torch.bfloat16, "kv_cache_dtype_str": "auto"}
    fields |= {"is_draft_worker": False, "post_capture_kv_active": False, "kv_shard_rank": None}
    for name, value in {**fields, "model_config": model, "layer_info": numbers}.items():
        setattr(made, name, value)  # which has slots
    return made


def ascend_pool(sglang: SimpleNamespace, layers: range, **sizes: int) -> Any:
    """The pool that a server on Ascend makes of these layers."""
    made = configurator_of(sglang, layers, **sizes)
    return made._build_ascend_mha_kv_pool(max_total_num_tokens=NUM_TOKENS)


def plain_pool(sglang: SimpleNamespace, layers: range, **sizes: int) -> Any:
    """The pool that a server on other devices makes of them."""
    made = configurator_of(sglang, layers, **sizes)
    return made._build_mha_kv_pool(
        max_total_num_tokens=NUM_TOKENS, mha_pool_class=sglang.pools.MHATokenToKVPool
    )


def sent(
    sglang: SimpleNamespace,
    source: Any,
    target: Any,
    src_pages: Any,
    dst_pages: Any,
    **options: Any,
) -> list[list[int]]:
    """Addresses and lengths of what `AscendKVManager.send_kvcache` hands to its engine."""
    layers = {"prefill_start_layer": source.start_layer, "total_kv_layers": target.layer_num}
    kv_args = SimpleNamespace(**layers)
    names = ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    for name, values in zip(names, source.get_contiguous_buf_infos(), strict=True):
        setattr(kv_args, name, values)
    manager = make_manager(sglang, kv_args=kv_args, **options)
    src, dst = (np.asarray(pages, np.int32) for pages in (src_pages, dst_pages))
    ptrs, _, _ = target.get_contiguous_buf_infos()
    assert manager.send_kvcache("session", src, ptrs, dst, ImmediateExecutor()) == 0
    return [list(column) for column in zip(*manager.engine.blocks, strict=True)]


def document_of(
    sglang: SimpleNamespace, source: Any, target: Any, name: str, **options: Any
) -> dict[str, Any]:
    """The pages of a sequence, from a server called so to the one that decodes."""
    src_pages, dst_pages = [1, 2, 5], [3, 4, 1]
    blocks = sent(sglang, source, target, src_pages, dst_pages, **options)
    memories = memory_of_pool(source), memory_of_pool(target)
    return from_transfer(*memories, blocks, src_pages, dst_pages, names=(name, "decode"))
