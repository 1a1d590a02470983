# SPDX-License-Identifier: Apache-2.0
"""The linter refutes KV transfers of the published sglang 0.5.23, with its own pools and
descriptors, and proves them once mended."""

import importlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cpattn.integrations import sglang as plugin
from cpattn_proof import lint
from cpattn_proof.linting.adapters.transfers import from_transfer, joined, memory_of_pool
from support.proof.shipped import assert_proved, assert_refuted_as_written, shipped_entry
from support.sglang import sglang_planning
from support.sglang.installed import MARKS
from support.sglang.sglang_upstream import ImmediateExecutor, make_manager
from support.stand_ins import stand_ins_for_what_lacks

pytestmark = MARKS
PAGE_SIZE, NUM_TOKENS = 16, 128
MODULES = {
    "configurator": "sglang.srt.mem_cache.kv_cache_configurator",
    "npu_pools": "sglang.srt.hardware_backend.npu.memory_pool_npu",
}
STAGES = (range(7), range(7, 15))
EVEN = {"head_dim": 32, "v_head_dim": 32}
NARROW = {"head_dim": 192, "v_head_dim": 128}


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    planning = sglang_planning.load()
    with stand_ins_for_what_lacks():
        modules = {key: importlib.import_module(name) for key, name in MODULES.items()}
    return SimpleNamespace(**vars(planning), **modules)


@pytest.fixture(autouse=True)
def configured(sglang, switch, monkeypatch) -> Iterator[None]:
    monkeypatch.delenv("ASCEND_USE_FIA", raising=False)
    with sglang.runtime.get_context().override_server_args(page_size=PAGE_SIZE):
        yield


def configurator_of(
    sglang: SimpleNamespace, layers: range, *, head_dim: int, v_head_dim: int, num_kv_heads: int = 2
) -> Any:
    made = object.__new__(sglang.configurator.KVCacheConfigurator)
    counts = {"start_layer": layers.start, "end_layer": layers.stop}
    dims = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    model = SimpleNamespace(get_num_kv_heads=lambda *_: num_kv_heads, **dims)
    numbers = SimpleNamespace(num_effective_layers=len(layers), **counts)
    fields = {"device": "cpu", "kv_cache_dtype": torch.bfloat16, "kv_cache_dtype_str": "auto"}
    fields |= {"is_draft_worker": False, "post_capture_kv_active": False, "kv_shard_rank": None}
    for name, value in {**fields, "model_config": model, "layer_info": numbers}.items():
        setattr(made, name, value)  # the class has slots
    return made


def ascend_pool(sglang: SimpleNamespace, layers: range, **sizes: int) -> Any:
    made = configurator_of(sglang, layers, **sizes)
    return made._build_ascend_mha_kv_pool(max_total_num_tokens=NUM_TOKENS)


def plain_pool(sglang: SimpleNamespace, layers: range, **sizes: int) -> Any:
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
    """Return addresses and lengths that `AscendKVManager.send_kvcache` passes to its engine."""
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
    """Return the document of a sequence's pages sent from server `name` to the decode server."""
    src_pages, dst_pages = [1, 2, 5], [3, 4, 1]
    blocks = sent(sglang, source, target, src_pages, dst_pages, **options)
    memories = memory_of_pool(source), memory_of_pool(target)
    return from_transfer(*memories, blocks, src_pages, dst_pages, names=(name, "decode"))


def two_stages(sglang: SimpleNamespace) -> dict[str, Any]:
    decode = ascend_pool(sglang, range(15), **EVEN)
    pools = [ascend_pool(sglang, layers, **EVEN) for layers in STAGES]
    stages = (document_of(sglang, x, decode, f"stage {i}", pp_size=2) for i, x in enumerate(pools))
    return joined(list(stages))


def test_27740_values_of_a_stage_go_to_keys_of_other_layers(sglang):
    """The fault is in `get_mha_kv_ptrs_with_pp`; the plug-in's part ``strict_kv`` mends it."""
    entry = shipped_entry("sgl-project/sglang#27740", "lint")
    report = lint(two_stages(sglang))
    assert_refuted_as_written(report, entry)
    kinds = {found.kind for found in report.findings}
    assert kinds == {"xfer-pair", "xfer-overlap", "xfer-missing"}
    plugin.install("strict_kv")
    assert_proved(lint(two_stages(sglang)), entry)


def narrow_values(sglang: SimpleNamespace, make_decode: Any) -> dict[str, Any]:
    """Return the transfer of a model with values narrower than keys, prefilled on Ascend."""
    prefill = ascend_pool(sglang, range(2), **NARROW)
    return document_of(sglang, prefill, make_decode(sglang, range(2), **NARROW), "prefill")


def test_39058_pages_of_values_are_as_long_as_those_of_keys(sglang, monkeypatch):
    """`_build_ascend_mha_kv_pool` leaves out `v_head_dim`; `_build_mha_kv_pool` beside it has it.

    Two servers on Ascend have the same fault, so their transfers fit.
    """
    entry = shipped_entry("sgl-project/sglang#39058", "lint")
    prefill = ascend_pool(sglang, range(2), **NARROW)
    key = PAGE_SIZE * 2 * 192 * 2  # tokens, heads, dim, bytes
    assert prefill.get_contiguous_buf_infos()[2] == [key] * 4
    assert_refuted_as_written(lint(narrow_values(sglang, plain_pool)), entry)
    assert lint(narrow_values(sglang, ascend_pool)).proved

    pools, mended = sglang.npu_pools, partial(sglang.npu_pools.NPUMHATokenToKVPool, v_head_dim=128)
    monkeypatch.setattr(pools, "NPUMHATokenToKVPool", mended)
    for make_decode in (plain_pool, ascend_pool):
        assert_proved(lint(narrow_values(sglang, make_decode)), entry)
