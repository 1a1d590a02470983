# SPDX-License-Identifier: Apache-2.0
"""Process with the attention backend on pools of sglang, without an engine.

It saves {"layers": results and arguments of the oracle, "encoders": results of this library and of
sglang, and arguments of the oracle, "refused": messages and words that they must have, "plans": how
many, "zero scale": a message} by `torch.save`.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from support.sglang.sglang_attention_layers import (
    DECODES,
    EXTENDS,
    HEADS,
    PROMPTS,
    SWA,
    WINDOW,
    Step,
    attend,
    attend_latents,
    make_layer,
    make_pool,
    make_runner,
)
from support.sglang.sglang_encoder_layers import encoders

# isort: split
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode


def count_plans() -> int:
    """Count plans of a pass with six layers, three with a window, and of a layer in the next."""
    step = Step(EXTENDS, 16, torch.float32, windows=False)
    runner = make_runner(make_pool(16, torch.float32, windows=False), torch.float32)
    backend, batch = step.begin(runner, decodes=False)
    counts = []
    for layers in (3, 1):
        backend.init_forward_metadata(batch)
        for _ in range(layers):
            for window in (-1, WINDOW)[: layers - 1 or 1]:
                layer = make_layer(sliding_window_size=window)
                backend.forward(step.q, step.k[step.new], step.v[step.new], layer, batch)
        counts.append(len(backend._plans))
    return counts


def error_of_zero_scale() -> str:
    """Return the error of a checkpoint with a scale of zero, which is not a missing scale."""
    try:
        attend(code=torch.float8_e4m3fn, code_scales=(0.0, 1.0))
    except ValueError as error:
        return str(error)
    return ""


def published(**configuration: Any) -> Any:
    return runtime_context.get_context().override_server_args(**configuration)


def refusals() -> list[tuple[str, str]]:
    """Return the errors of unsupported cases, with the words that they must contain."""
    messages = []

    def refused(
        words: str, change: Any = None, call: Any = None, mode: Any = ForwardMode.EXTEND,
        keys: Any = None, attributes: Any = (), split: Any = None, **layer: Any,
    ) -> None:  # fmt: skip
        runner = make_runner(make_pool(16, torch.float32, windows=False), torch.float32)
        if change:
            change(runner)
        try:
            step = Step(EXTENDS, 16, torch.float32, windows=False)
            backend, batch = step.begin(runner, decodes=False)
            batch.forward_mode, batch.attn_cp_metadata = mode, split
            asked = make_layer(**layer)
            vars(asked).update(attributes)
            backend.forward_extend(step.q, keys, keys, asked, batch, **(call or {}))
        except NotImplementedError as error:
            messages.append((str(error), words))

    def set_(**values: Any) -> Callable[[Any], None]:
        return lambda runner: vars(runner).update(values)

    def set_layout(runner: Any) -> None:
        runner.token_to_kv_pool.kv_cache_layout = "hnd"

    both, dp = (
        SimpleNamespace(**{name: True}) for name in ("is_encoder_decoder", "enable_dp_attention")
    )
    encoder = {"attn_type": AttentionType.ENCODER_ONLY}
    both_directions = {"attn_type": AttentionType.DECODER_BIDIRECTIONAL}
    refused("device cuda", set_(device="cuda"))
    refused("chunks of 60 tokens, as of Llama 4, in pages of 16", set_(attention_chunk_size=60))
    refused("--enable-dp-attention", set_(server_args=dp))
    refused("models in torch.float64", set_(dtype=torch.float64))
    refused("in torch.float32 of a model in torch.bfloat16", set_(dtype=torch.bfloat16))
    refused("another layout", set_layout)
    refused("windows of cross attention", is_cross_attention=True, sliding_window_size=WINDOW)
    refused("context parallelism (--attn-cp-size) of encoders", split=object(), **encoder)
    refused("--chunked-prefill-size -1 --disable-radix-cache", **both_directions)
    refused("Grok", attributes={"xai_temperature_len": 8})
    refused("softcap sigmoid", logit_cap=5.0, logit_capping_method="sigmoid")
    refused("TARGET_VERIFY", mode=ForwardMode.TARGET_VERIFY)
    refused("idx_q", call={"idx_q": torch.zeros(1)})
    refused("not in the KV cache", keys=torch.zeros(1), call={"save_kv_cache": False})
    split = {"tp_size": 2, "attn_cp_size": 2}
    interleave = {**split, "enable_prefill_cp": True, "cp_strategy": "interleave"}
    for configuration, words in (
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        (split, "without --enable-prefill-cp"),
        (interleave, "--cp-strategy interleave"),
    ):
        with published(**configuration):
            refused(words)
    with published(**{**interleave, "cp_strategy": "zigzag"}):
        refused("of attention in chunks", set_(attention_chunk_size=64))
        refused("with an encoder and a decoder", set_(model_config=both))
    return messages


def layers() -> dict[str, Any]:
    torch.manual_seed(3)
    sinks = torch.randn(HEADS).bfloat16()
    window = {"sliding_window_size": WINDOW}
    encoder = {"attn_type": AttentionType.ENCODER_ONLY}
    both = {"attn_type": AttentionType.DECODER_BIDIRECTIONAL}
    with published(chunked_prefill_size=-1, disable_radix_cache=True):
        prompts = {
            "prompts of both directions": attend(PROMPTS, **both),
            "prompts of both directions, window": attend(PROMPTS, **both, **window),
            "prompts of both directions, decode": attend(DECODES, **both, **window),
        }
    return {
        **prompts,
        **{f"pages of {n}": attend(page_size=n) for n in (1, 16, 64)},
        **{f"decode, pages of {n}": attend(DECODES, page_size=n) for n in (1, 16, 64)},
        "float16": attend(dtype=torch.float16),
        "bfloat16": attend(DECODES, dtype=torch.bfloat16),
        "heads of 24 numbers": attend(head_dim=24),
        "heads of 24 numbers, decode": attend(DECODES, dtype=torch.bfloat16, head_dim=24),
        "window": attend(**window),
        "encoder": attend(**encoder),
        "encoder, window": attend(**encoder, **window),
        "encoder, a pool for windows": attend(windows=True, layer_id=SWA, **encoder, **window),
        "chunks": attend(chunk_size=32, use_irope=True),
        "chunks, pages of 1": attend(DECODES, 1, chunk_size=33, use_irope=True),
        "a layer without chunks": attend(chunk_size=32),
        "softcap": attend(logit_cap=2.0),
        "sinks": attend(sinks=sinks),
        "a pool for windows": attend(windows=True, layer_id=SWA, **window),
        "a pool for windows, pages of 1": attend(DECODES, 1, windows=True, layer_id=SWA, **window),
        "the other layers beside it": attend(windows=True, sinks=sinks),
        "latents": attend_latents(EXTENDS),
        "latents, decode": attend_latents(DECODES),
        "float8_e4m3fn": attend(code=torch.float8_e4m3fn),
        "float8_e5m2": attend(DECODES, code=torch.float8_e5m2),
    }


if __name__ == "__main__":
    with published(tp_size=1):
        found = {"layers": layers(), "refused": refusals(), "plans": count_plans()}
        found["encoders"] = encoders()
        found["zero scale"] = error_of_zero_scale()
    torch.save(found, sys.argv[1])
