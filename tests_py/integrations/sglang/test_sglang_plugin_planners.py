# SPDX-License-Identifier: Apache-2.0
"""The plug-in's smaller parts against sglang's own functions, its switch and its loading; functions
that it takes from `cpattn.transfer` have tests in tests_py/transfer/sglang_0_5_23."""

import importlib
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest

from cpattn.integrations import sglang as plugin
from cpattn.integrations.sglang import planners
from support.engine_runs import run_module
from support.entry_points import write_distribution
from support.sglang.installed import MARKS
from support.sglang.sglang_planning import kv_list
from support.time_limits import PATIENCE

pytestmark = MARKS


def test_every_topk_choice(sglang):
    method = sglang.topk.TopkTransformMethod
    upstream = sglang.dsa.DeepseekSparseAttnBackend.get_topk_transform_method
    # Values of ``--dsa-prefill-backend``.
    hints = get_type_hints(sglang.options.ExecKernel, include_extras=True)
    implementations = hints["dsa_prefill_backend"].__metadata__[0].choices
    assert "flashmla_sparse_q8" in implementations
    chosen, modes = set(), (None, *sglang.batch.ForwardMode)
    for mode, fp8, implementation in itertools.product(modes, (False, True), implementations):
        backend = SimpleNamespace(dsa_kv_cache_store_fp8=fp8, dsa_prefill_impl=implementation)
        ours = plugin.get_topk_transform_method(backend, mode)
        assert ours is upstream(backend, mode), (mode, fp8, implementation)
        chosen.add(ours)
    assert chosen == {method.PAGED, method.RAGGED}


def test_groups_of_pages_are_of_ints():
    groups = plugin.group_concurrent_contiguous(np.arange(3), np.array([4, 5, 9]))
    assert groups == ([[0, 1], [2]], [[4, 5], [9]])
    assert {type(page) for side in groups for group in side for page in group} == {int}


def make_manager(kind: type[Any], **kv_args: Any) -> Any:
    manager = kind.__new__(kind)
    manager.kv_args = SimpleNamespace(**kv_args)
    return manager


def original(*arguments: Any) -> Any:
    return arguments


def test_strict_mla_gives_groups_to_those_of_the_same_layers(sglang, monkeypatch):
    upstream = sglang.ascend.AscendKVManager.get_mla_kv_ptrs_with_pp
    parallel = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True))
    monkeypatch.setattr(sglang.ascend, "get_parallel", lambda: parallel)
    monkeypatch.setattr(planners, "_from_sglang", lambda module, name: lambda: parallel)
    fields = {"prefill_start_layer": 2, "hidden_kv_layers": 4, "kv_buf_groups": 3}
    fields |= {"draft_kv_layers": 1, "num_draft_entries": 0, "mla_compression_ratios": None}
    manager = make_manager(sglang.ascend.AscendKVManager, **fields)
    stage, decode = kv_list(range(2, 4), "KVI", 1), kv_list(range(4), "KVI", 1)
    assert planners.strict_mla_kv_ptrs(original, manager, stage, decode) == (stage, stage, 9)
    without = kv_list(range(4), "KVI")
    assert upstream(manager, stage, without)[1] != stage
    with pytest.raises(ValueError, match="get_mla_kv_ptrs_with_pp: "):
        planners.strict_mla_kv_ptrs(original, manager, stage, without)
    parallel.pp_group.is_last_rank = False  # such a rank has no drafts
    with pytest.raises(ValueError, match="get_mla_kv_ptrs_with_pp: "):
        planners.strict_mla_kv_ptrs(original, manager, stage, decode)


def test_strict_mla_keeps_drafts_of_flat_lists_apart():
    fields = {"num_draft_entries": 1, "total_kv_layers": 4}
    stage, decode = ["K2", "K3", "dK0"], kv_list(range(4), "K", 1)
    last = make_manager(SimpleNamespace, prefill_start_layer=2, **fields)
    assert planners.strict_mla_kv_ptrs(original, last, stage, decode)[1] == stage
    first = make_manager(SimpleNamespace, prefill_start_layer=0, **fields)
    with pytest.raises(ValueError, match="the stage with drafts must end at layer 4"):
        planners.strict_mla_kv_ptrs(original, first, ["K0", "dK0"], decode)
    whole = (first, decode, decode)
    assert planners.strict_mla_kv_ptrs(original, *whole) == (*whole, None)


def test_other_pools_are_left_to_sglang():
    plain = make_manager(SimpleNamespace, prefill_start_layer=0, kv_buf_groups=1)
    assert planners.strict_mla_kv_ptrs(original, plain, [1], [2]) == (plain, [1], [2], None)
    assert planners.strict_mha_kv_ptrs(original, plain, [1], [2]) == (plain, [1], [2])
    grouped = make_manager(
        SimpleNamespace, prefill_start_layer=0, kv_buf_groups=2, hidden_kv_layers=1
    )
    arguments = (grouped, [1, 2], [3, 4], "swa")
    assert planners.strict_mla_kv_ptrs(original, *arguments) == arguments


def test_layers_are_recorded_for_pools_that_have_all(sglang):
    def recorder(kv_args: Any, *args: Any, **kwargs: Any) -> None:
        kv_args.seen = (args, kwargs)

    kinds = {"MHATokenToKVPool": 61, "MLATokenToKVPool": 61, "HybridLinearKVPool": 0}
    for kind, recorded in kinds.items():
        pool, kv_args = object.__new__(getattr(sglang.pools, kind)), SimpleNamespace()
        planners.record_kv_layers(recorder, kv_args, pool, None, 61, req_to_token_pool="r")
        assert kv_args.seen == ((pool, None, 61), {"req_to_token_pool": "r"})
        assert kv_args.total_kv_layers == recorded


def test_switching_at_run_time(sglang, switch):
    kv_args = {"prefill_start_layer": 0, "total_kv_layers": 15}
    manager = make_manager(sglang.mooncake.MooncakeKVManager, **kv_args)
    src, dst = kv_list(range(7), "KV"), kv_list(range(15), "KV")
    wrong = manager.get_mha_kv_ptrs_with_pp(src, dst)[3]
    assert wrong != src[7:]
    for _ in range(2):
        plugin.install("strict_kv", "kv")
        assert manager.get_mha_kv_ptrs_with_pp(src, dst)[3] == src[7:]
        plugin.install()  # the entry point's call changes nothing
        assert manager.get_mha_kv_ptrs_with_pp(src, dst)[3] == src[7:]
        plugin.install("metadata")
        assert manager.get_mha_kv_ptrs_with_pp(src, dst)[3] == wrong
        plugin.uninstall()
        assert manager.get_mha_kv_ptrs_with_pp(src, dst)[3] == wrong


def test_an_unknown_part_is_refused(switch, monkeypatch):
    parts = "metadata", "topk", "kv", "shards", "strict_kv", "cp_cpu", "attention"
    message = re.escape(f"parts (CPATTN_SGLANG_PARTS) must be among {parts}, got 'speed'")
    with pytest.raises(ValueError, match=message):
        plugin.install("speed")
    monkeypatch.setenv("CPATTN_SGLANG_PARTS", "kv, speed")
    with pytest.raises(ValueError, match=message):
        plugin.install()


@pytest.mark.parametrize("error", [ImportError, RuntimeError, AttributeError])
def test_what_a_release_lacks_is_left_alone(sglang, switch, monkeypatch, caplog, error):
    """The rest is hooked and reported, but no part of a module that fails to import or that lacks
    the class."""

    def import_module(name: str) -> Any:
        if name.endswith(".dsa_backend"):
            raise error("no device")
        if name.endswith(".interleave"):
            return SimpleNamespace()
        return importlib.import_module(name)

    monkeypatch.setattr(switch, "importlib", SimpleNamespace(import_module=import_module))
    with caplog.at_level("INFO"):
        plugin.install()
    assert "InterleaveCPStrategy.build_metadata alone: 'types.SimpleNamespace'" in caplog.text
    assert "get_topk_transform_method alone: no device" in caplog.text
    assert (
        "sglang: ZigzagCPStrategy.build_metadata, group_concurrent_contiguous, "
        "filter_kv_indices_for_shard_rank, " in caplog.text
    )


def test_hooks_of_others_come_after(sglang, switch, monkeypatch):
    target = "sglang.srt.disaggregation.common.utils.group_concurrent_contiguous"
    monkeypatch.setattr(switch, "_hooked", set())
    monkeypatch.setattr(sglang.registry.HookRegistry, "_patched", {target})
    with pytest.raises(RuntimeError, match=f"before sglang applies other hooks to {target}"):
        plugin.install("kv", "metadata")
    assert not switch._hooked
    assert not switch._active


ALL = ["zigzag", "interleave", "topk", "kv", "shards", "attention"]


def test_loading(tmp_path):
    write_distribution(tmp_path)
    worker = "support.sglang.sglang_plugin_worker"
    printed = run_module(worker, folders=(tmp_path,), timeout=PATIENCE).splitlines()
    answers = json.loads(next(line for line in printed if line.startswith("{")))
    found = {"filtered by SGLANG_PLUGINS": [], "CPATTN_PLUGINS=0": [], "loaded": ALL}
    found |= {"loaded again": ALL, "hooks per target": [1], "uninstalled": []}
    found |= {"CPATTN_SGLANG_PARTS": ["zigzag", "interleave", "strict_kv"]}
    assert answers == found
    log = [line for line in printed if line.startswith("cpattn.")]
    assert log == [
        "cpattn.integrations.sglang.plugin: cpattn plans for sglang: "
        "ZigzagCPStrategy.build_metadata, InterleaveCPStrategy.build_metadata, "
        "DeepseekSparseAttnBackend.get_topk_transform_method, group_concurrent_contiguous, "
        "filter_kv_indices_for_shard_rank, PageInterleavePoolAllocator.alloc_extend, "
        "PageInterleavePoolAllocator.free, PageInterleaveKVPoolMixin.begin_shard_extend "
        "(off: CPATTN_PLUGINS=0)",
        "cpattn.integrations.sglang.plugin: cpattn plans for sglang: "
        "ZigzagCPStrategy.build_metadata, InterleaveCPStrategy.build_metadata, "
        "setup_state_kv_args, CommonKVManager.get_mha_kv_ptrs_with_pp, "
        "CommonKVManager.get_mla_kv_ptrs_with_pp, AscendKVManager.get_mla_kv_ptrs_with_pp "
        "(off: CPATTN_PLUGINS=0)",
    ]
