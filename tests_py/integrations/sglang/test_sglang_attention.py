# SPDX-License-Identifier: Apache-2.0
"""The attention backend on sglang's own KV pools, without an engine, against the oracle."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from support.cases import assert_attention
from support.children import path_with
from support.sglang.installed import MARKS
from support.time_limits import PATIENCE

pytestmark = [*MARKS, pytest.mark.timeout(4 * PATIENCE)]
LAYERS = [
    *(f"{kind}pages of {n}" for kind in ("", "decode, ") for n in (1, 16, 64)),
    *("float16", "bfloat16", "heads of 24 numbers", "heads of 24 numbers, decode", "window"),
    *("softcap", "sinks", "a pool for windows", "a pool for windows, pages of 1"),
    *("the other layers beside it", "latents", "latents, decode"),
    *("float8_e4m3fn", "float8_e5m2"),
]
# Of each case what of the message says what it is about.
REFUSED = dict(
    [
        *(("device", "device cuda"), ("chunks", "Llama 4"), ("encoder", "cross attention")),
        *(("dp", "--enable-dp-attention"), ("float64", "models in torch.float64")),
        ("bfloat16", "in torch.float32 of a model in torch.bfloat16"),
        *(("layout", "another layout"), ("cross", "other than of decoders")),
        *(("images", "DECODER_BIDIRECTIONAL"), ("grok", "Grok"), ("softcap", "softcap sigmoid")),
        *(("mode", "TARGET_VERIFY"), ("argument", "idx_q")),
        *(("beside", "keys that are not in the KV cache"), ("speculative", "speculative decoding")),
        *(("compile", "--enable-torch-compile"), ("cp", "without --enable-prefill-cp")),
        ("interleave", "--cp-strategy interleave"),
    ]
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process says that has the stand-ins of cpu_engine, which must not be seen here."""
    path = tmp_path_factory.mktemp("layers") / "found.pt"
    environment = os.environ | {"PYTHONPATH": path_with()}
    command = [sys.executable, "-m", "support.sglang.sglang_attention_layers", path]
    options = {"capture_output": True, "text": True, "timeout": 3 * PATIENCE}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("case", LAYERS)
def test_a_batch_of_all_kinds(found, case):
    out, inputs = found["layers"][case]
    assert_attention(out, None, inputs)  # sglang asks for no LSE


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(found, case):
    message = found["refused"][case]
    assert message.startswith("--attention-backend cpattn does not serve ")
    assert REFUSED[case] in message


def test_all_cases_are_compared_and_layers_of_a_kind_share_a_plan_of_each_pass(found):
    assert set(found["layers"]) == set(LAYERS)
    assert set(found["refused"]) == set(REFUSED)
    assert found["zero scale"] == "run_attention: k_scale must be a positive number, got 0"
    assert found["plans"] == [2, 1]
