# SPDX-License-Identifier: Apache-2.0
"""The plug-in as sglang finds, loads and filters it, and how sglang calls torch_npu."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cpattn.integrations import torch_npu
from support.entry_points import write_distribution
from support.sglang.installed import MARKS

pytestmark = MARKS
SGLANG = find_spec("sglang")

ALL = ["zigzag", "interleave", "topk", "kv", "shards", "attention"]


def test_loading(tmp_path):
    write_distribution(tmp_path)
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    command = [sys.executable, "-W", "ignore", "-m", "support.sglang.sglang_plugin_worker"]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    found = {"filtered by SGLANG_PLUGINS": [], "CPATTN_PLUGINS=0": [], "loaded": ALL}
    found |= {"loaded again": ALL, "hooks per target": [1], "uninstalled": []}
    found |= {"CPATTN_SGLANG_PARTS": ["zigzag", "interleave", "strict_kv"]}
    assert answers == found
    log = [line for line in done.stderr.splitlines() if line.startswith("cpattn.")]
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


with torch_npu.install():
    OPERATORS = torch.ops.npu
NAMES = [
    *("npu_fused_infer_attention_score", "npu_lightning_indexer", "npu_rotary_mul"),
    *("npu_scatter_nd_update_", "npu_sparse_flash_attention"),
]


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Yield each operator that is called, its overload and the call."""
    folders = SGLANG.submodule_search_locations if SGLANG else []
    for path in (path for folder in folders for path in Path(folder, "srt").rglob("*.py")):
        text = path.read_text("utf-8-sig")
        if "torch_npu" not in text and "torch.ops.npu" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                source = ast.unparse(node.func)
                name = source.removeprefix("torch_npu.").removeprefix("torch.ops.npu.")
                operator, _, overload = name.partition(".")
                if name != source and operator in NAMES:
                    yield operator, overload or "default", node


CALLS = list(calls())


@pytest.mark.parametrize("name", NAMES)
def test_calls_fit_the_schema(name):
    mine = [(overload, call) for operator, overload, call in CALLS if operator == name]
    assert mine
    for overload, call in mine:
        arguments = getattr(getattr(OPERATORS, name), overload)._schema.arguments
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        given = set(positional[: len(call.args)]) | {keyword.arg for keyword in call.keywords}
        assert len(call.args) <= len(positional)
        assert given <= {argument.name for argument in arguments}
        assert given >= {a.name for a in arguments if not a.has_default_value()}
