# SPDX-License-Identifier: Apache-2.0
"""The plug-in as sglang finds, loads and filters it."""

import json
import os
import subprocess
import sys

from support.entry_points import write_distribution
from support.sglang.installed import MARKS

pytestmark = MARKS

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
