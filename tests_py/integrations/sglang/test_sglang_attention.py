# SPDX-License-Identifier: Apache-2.0
"""Attention backend on sglang's own KV pools, without an engine, against the oracle."""

import pytest
import torch

from support.cases import assert_attention
from support.engine_runs import run_module
from support.sglang.installed import MARKS
from support.time_limits import PATIENCE

pytestmark = [*MARKS, pytest.mark.timeout(4 * PATIENCE)]
LAYERS = [
    *(f"{kind}pages of {n}" for kind in ("", "decode, ") for n in (1, 16, 64)),
    *("float16", "bfloat16", "heads of 24 numbers", "heads of 24 numbers, decode", "window"),
    *("softcap", "sinks", "a pool for windows", "a pool for windows, pages of 1"),
    *("the other layers beside it", "encoder", "encoder, window", "latents", "latents, decode"),
    "encoder, a pool for windows",
    *(f"prompts of both directions{kind}" for kind in ("", ", window", ", decode")),
    *("chunks", "chunks, pages of 1", "a layer without chunks"),
    *("float8_e4m3fn", "float8_e5m2"),
]
BESIDE_ENCODERS = [
    *(f"{side} the encoder, pages of {n}" for side in ("to", "behind") for n in (1, 16)),
    *(f"to the encoder, {kind}" for kind in ("decode", "bfloat16", "a mask", "none of one")),
    *(f"behind the encoder, {kind}inside of a page" for kind in ("", "decode, ")),
    "behind the encoder, decode",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return answers of a process with stand-ins of cpu_engine, which must not leak into this."""
    path = tmp_path_factory.mktemp("layers") / "found.pt"
    run_module("support.sglang.sglang_attention_cases", path, timeout=3 * PATIENCE)
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("case", LAYERS)
def test_a_batch_of_all_kinds(found, case):
    out, inputs = found["layers"][case]
    assert_attention(out, None, inputs)  # sglang needs no LSE


@pytest.mark.parametrize("case", BESIDE_ENCODERS)
def test_layers_of_a_decoder_with_an_encoder(found, case):
    """The own backend of sglang gives equal results, so slots and lengths mean the same there."""
    out, native, inputs = found["encoders"][case]
    assert_attention(out, None, inputs)
    if native is not None:
        assert_attention(native, None, inputs)


def test_what_cannot_be_served_is_refused_by_name(found):
    assert len(found["refused"]) == 20
    for message, words in found["refused"]:
        assert message.startswith("--attention-backend cpattn does not serve "), words
        assert words in message


def test_all_cases_are_compared_and_layers_of_a_kind_share_a_plan_of_each_pass(found):
    assert set(found["layers"]) == set(LAYERS)
    assert set(found["encoders"]) == set(BESIDE_ENCODERS)
    assert found["zero scale"] == "run_attention: k_scale must be a positive number, got 0"
    assert found["plans"] == [2, 1]
