# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  stand-ins come before what imports them
"""A process with the attention backend on pools of sglang's, without an engine.

It saves {"layers": results and arguments of the oracle, "refused": messages and words that they
must have, "plans": how many, "zero scale": a message} by `torch.save`.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cpattn.integrations.sglang import cpu_engine

cpu_engine.install()  # before anything of sglang is imported
from sglang.srt import runtime_context
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    KVWriteLoc,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from cpattn.integrations.sglang.attention import CpattnAttnBackend
from support.cases import one_after_another

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 64, 20
# A chunk behind a cached prefix, a whole prompt, three tokens being decoded; and all decoded.
EXTENDS = ([40, 70, 1, 1, 1], [100, 70, 64, 33, 1])
DECODES = ([1, 1, 1], [100, 17, 64])
FULL, SWA = 0, 1  # layers
CODE_SCALES = (0.5, 2.0)
SIZE, SWA_SIZE = 1280, 640  # tokens of pools


def make_pool(page_size: int, dtype: torch.dtype, windows: bool, **changes: Any) -> Any:
    """NaN where nobody has written; with a smaller one for layers with windows."""
    common = {"page_size": page_size, "dtype": dtype, "head_num": KV_HEADS, "head_dim": DIM}
    common |= {"size": SIZE, "device": "cpu", "enable_memory_saver": False, **changes}
    if windows:
        layers = {"swa_attention_layer_ids": [SWA], "full_attention_layer_ids": [FULL]}
        pool = SWAKVPool(size_swa=SWA_SIZE, **layers, **common)
        pools = [pool.full_kv_pool, pool.swa_kv_pool]
    else:
        pool = MHATokenToKVPool(layer_num=2, **common)
        pools = [pool]
    for part in pools:
        for buffer in (*part.k_buffer, *part.v_buffer):
            buffer.fill_(0x7F if buffer.dtype == torch.uint8 else torch.nan)
    return pool


def make_runner(pool: Any, dtype: torch.dtype) -> Any:
    requests = ReqToTokenPool(8, 256, "cpu", enable_memory_saver=False)
    requests.req_to_token.fill_(-1)
    pools = {"req_to_token_pool": requests, "token_to_kv_pool": pool, "page_size": pool.page_size}
    types = {"device": "cpu", "dtype": dtype, "kv_cache_dtype": pool.dtype}
    model, server = {"is_encoder_decoder": False}, {"enable_dp_attention": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(**model),
        server_args=SimpleNamespace(**server),
        attention_chunk_size=None,
        **pools,
        **types,
    )


def make_layer(layer_id: int = FULL, head_dim: int = DIM, **options: Any) -> RadixAttention:
    return RadixAttention(HEADS, head_dim, head_dim**-0.5, KV_HEADS, layer_id, **options)


def shuffled_slots(page_size: int, num_pages: int, lens: list[int], seed: int) -> list[Any]:
    """Slots of each request, in pages of its own; page 0 is nobody's, as in sglang."""
    pages = iter((np.random.default_rng(seed).permutation(num_pages) + 1).tolist())
    slots = []
    for n in lens:
        own = np.array([next(pages) for _ in range(-(-n // page_size))])
        positions = own[:, None] * page_size + np.arange(page_size)
        slots.append(torch.from_numpy(positions.ravel()[:n]))
    return slots


class Step:
    def __init__(
        self, lens: Any, page_size: int, dtype: torch.dtype, windows: bool, head_dim: int = DIM
    ) -> None:
        self.q_lens, self.kv_lens = lens
        self.page_size, self.windows = page_size, windows
        torch.manual_seed(0)
        shape = (sum(self.kv_lens), KV_HEADS, head_dim)
        self.k, self.v = (torch.randn(shape).to(dtype) for _ in "kv")
        self.q = torch.randn(sum(self.q_lens), HEADS * head_dim).to(dtype)
        self.slots = shuffled_slots(page_size, SIZE // page_size, self.kv_lens, seed=1)
        self.swa_slots = shuffled_slots(page_size, SWA_SIZE // page_size, self.kept_lens(), seed=2)
        ends = np.cumsum(self.kv_lens)
        new = [range(e - q, e) for e, q in zip(ends, self.q_lens, strict=True)]
        self.new = torch.tensor([row for rows in new for row in rows])

    def first_kept(self, s: int) -> int:
        """Return the first token kept: pages before the windows of new tokens were given back."""
        return max(0, self.kv_lens[s] - self.q_lens[s] - WINDOW) // self.page_size * self.page_size

    def kept_lens(self) -> list[int]:
        return [n - self.first_kept(s) for s, n in enumerate(self.kv_lens)]

    def mapping(self) -> torch.Tensor:
        """Map slots to those of the pool for windows; 0 where there is none."""
        to_swa = torch.zeros(SIZE + self.page_size + 1, dtype=torch.int64)
        to_swa[-1] = -1
        for s, slots in enumerate(self.slots):
            to_swa[slots[self.first_kept(s) :]] = self.swa_slots[s]
        return to_swa

    def begin(self, runner: Any, decodes: bool) -> tuple[CpattnAttnBackend, ForwardBatch]:
        lens = torch.tensor(self.kv_lens)
        extend = torch.tensor(self.q_lens, dtype=torch.int32)
        kv_lens = {"seq_lens": lens, "seq_lens_cpu": lens, "seq_lens_sum": int(lens.sum())}
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.MIXED,
            batch_size=len(lens),
            input_ids=torch.zeros(len(self.q), dtype=torch.int64),
            req_pool_indices=torch.arange(len(lens)) + 2,
            out_cache_loc=torch.cat(self.slots)[self.new],
            extend_seq_lens=None if decodes else extend,
            **kv_lens,
        )
        for row, slots in zip(batch.req_pool_indices, self.slots, strict=True):
            runner.req_to_token_pool.req_to_token[row, : len(slots)] = slots
        return CpattnAttnBackend(runner), batch

    def write_prefixes(self, pool: Any, layer: RadixAttention, scales: dict[str, float]) -> None:
        rows = torch.ones(len(self.k), dtype=torch.bool)
        rows[self.new] = False
        slots = torch.cat(self.slots)
        where = KVWriteLoc(slots[rows])
        if self.windows:
            swa = self.mapping()[slots]
            rows &= swa > 0 if layer.layer_id == SWA else True
            where = KVWriteLoc(slots[rows], swa[rows])
        pool.set_kv_buffer(layer, where, self.k[rows].clone(), self.v[rows].clone(), **scales)

    def same_chunk(self, size: int) -> torch.Tensor:
        """Return a mask that shows keys of the chunk that a token is in."""
        masks = []
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            tokens, keys = torch.arange(kv_len - q_len, kv_len), torch.arange(kv_len)
            masks.append(tokens[:, None] // size == keys // size)
        return torch.cat([mask.flatten() for mask in masks])

    def oracle_inputs(self, **options: Any) -> dict[str, Any]:
        q, v = self.q.unflatten(1, (HEADS, -1)), options.pop("v_cache", self.v)
        return one_after_another(q, self.k, v, self.q_lens, self.kv_lens, **options)


def attend(
    lens: Any = EXTENDS,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    code: torch.dtype | None = None,
    code_scales: tuple[float, float] = CODE_SCALES,
    windows: bool = False,
    layer_id: int = FULL,
    head_dim: int = DIM,
    sinks: torch.Tensor | None = None,
    chunk_size: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The answer of one layer, and what the oracle is to be asked."""
    step = Step(lens, page_size, dtype, windows, head_dim)
    pool = make_pool(page_size, code or dtype, windows, head_dim=head_dim)
    runner, layer = make_runner(pool, dtype), make_layer(layer_id, head_dim, **options)
    runner.attention_chunk_size = chunk_size
    if windows:
        pool.register_mapping(step.mapping())
    scales = {}
    if code is not None:
        layer.k_scale_float, layer.v_scale_float = code_scales
        scales = dict(zip(("k_scale", "v_scale"), code_scales, strict=True))
    step.write_prefixes(pool, layer, scales)
    backend, batch = step.begin(runner, decodes=lens is DECODES)
    backend.init_forward_metadata(batch)
    new = (step.k[step.new].clone(), step.v[step.new].clone())  # sglang divides them in place
    out = backend.forward(step.q, *new, layer, batch, **({} if sinks is None else {"sinks": sinks}))
    if code is not None:
        step.k, step.v = (
            (x / scale).to(code).to(dtype) * scale
            for x, scale in zip((step.k, step.v), code_scales, strict=True)
        )
    asked = {"softcap": options.get("logit_cap", 0.0), "window": options.get("sliding_window_size")}
    if chunk_size is not None and options.get("use_irope"):
        asked["custom_mask"] = step.same_chunk(chunk_size)
    asked["causal"] = options.get("attn_type") != AttentionType.ENCODER_ONLY
    return out.unflatten(1, (HEADS, head_dim)), step.oracle_inputs(sinks=sinks, **asked)


def attend_latents(lens: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Answer as `attend` does for absorbed MLA: keys of 80 numbers, the first 64 being values."""
    step = Step(lens, 16, torch.float32, windows=False)
    step.k = torch.randn(len(step.k), 1, 80)
    step.q = torch.randn(len(step.q), HEADS * 80)
    sizes = {"size": SIZE, "page_size": 16, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
    where = {"dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
    pool = MLATokenToKVPool(layer_num=1, **sizes, **where)
    pool.kv_buffer[0].fill_(torch.nan)
    runner = make_runner(pool, torch.float32)
    layer = RadixAttention(HEADS, 80, 0.2, 1, FULL, v_head_dim=64)
    pool.set_kv_buffer(layer, KVWriteLoc(torch.cat(step.slots)), step.k, step.k[..., :64])
    pool.kv_buffer[0][torch.cat(step.slots)[step.new]] = torch.nan
    backend, batch = step.begin(runner, decodes=lens is DECODES)
    backend.init_forward_metadata(batch)
    new = step.k[step.new]
    out = backend.forward(step.q, new, new[..., :64], layer, batch)
    return out.unflatten(1, (HEADS, 64)), step.oracle_inputs(v_cache=step.k[..., :64], scale=0.2)


def count_plans() -> int:
    """Count plans of six layers in a pass, three with a window, then of one in the next pass."""
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
    """Return the error of a checkpoint with a scale of zero, which is not a missing one."""
    try:
        attend(code=torch.float8_e4m3fn, code_scales=(0.0, 1.0))
    except ValueError as error:
        return str(error)
    return ""


def published(**configuration: Any) -> Any:
    return runtime_context.get_context().override_server_args(**configuration)


def refusals() -> list[tuple[str, str]]:
    """Return each error of what cannot be served, with the words that it must contain."""

    def refused(
        change: Any = None, call: Any = None, mode: Any = ForwardMode.EXTEND, **layer: Any
    ) -> str:
        keys, attributes = layer.pop("keys", None), layer.pop("attributes", {})
        split = layer.pop("split", None)
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
            return str(error)
        return ""

    def set_(**values: Any) -> Callable[[Any], None]:
        return lambda runner: vars(runner).update(values)

    encoder, dp = (
        SimpleNamespace(**{name: True}) for name in ("is_encoder_decoder", "enable_dp_attention")
    )
    encoder_only = {"attn_type": AttentionType.ENCODER_ONLY}
    other_layout = {"kv_cache_layout": "hnd"}
    messages = [
        (refused(set_(device="cuda")), "device cuda"),
        (
            refused(set_(attention_chunk_size=60)),
            "chunks of 60 tokens, as of Llama 4, in pages of 16",
        ),
        (refused(set_(model_config=encoder)), "cross attention"),
        (refused(set_(server_args=dp)), "--enable-dp-attention"),
        (refused(set_(dtype=torch.float64)), "models in torch.float64"),
        (refused(set_(dtype=torch.bfloat16)), "in torch.float32 of a model in torch.bfloat16"),
        (refused(lambda x: vars(x.token_to_kv_pool).update(other_layout)), "another layout"),
        (refused(is_cross_attention=True), "other than within a sequence"),
        (refused(sliding_window_size=WINDOW, **encoder_only), "windows of encoders"),
        (
            refused(split=object(), **encoder_only),
            "context parallelism (--attn-cp-size) of encoders",
        ),
        (refused(attn_type=AttentionType.DECODER_BIDIRECTIONAL), "DECODER_BIDIRECTIONAL"),
        (refused(attributes={"xai_temperature_len": 8}), "Grok"),
        (refused(logit_cap=5.0, logit_capping_method="sigmoid"), "softcap sigmoid"),
        (refused(mode=ForwardMode.TARGET_VERIFY), "TARGET_VERIFY"),
        (refused(call={"idx_q": torch.zeros(1)}), "idx_q"),
        (refused(keys=torch.zeros(1), call={"save_kv_cache": False}), "not in the KV cache"),
    ]
    split = {"tp_size": 2, "attn_cp_size": 2}
    interleave = {**split, "enable_prefill_cp": True, "cp_strategy": "interleave"}
    for configuration, words in (
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        (split, "without --enable-prefill-cp"),
        (interleave, "--cp-strategy interleave"),
    ):
        with published(**configuration):
            messages.append((refused(), words))
    with published(**{**interleave, "cp_strategy": "zigzag"}):
        messages.append((refused(set_(attention_chunk_size=64)), "of attention in chunks"))
    return messages


def layers() -> dict[str, Any]:
    torch.manual_seed(3)
    sinks = torch.randn(HEADS).bfloat16()
    window = {"sliding_window_size": WINDOW}
    return {
        **{f"pages of {n}": attend(page_size=n) for n in (1, 16, 64)},
        **{f"decode, pages of {n}": attend(DECODES, page_size=n) for n in (1, 16, 64)},
        "float16": attend(dtype=torch.float16),
        "bfloat16": attend(DECODES, dtype=torch.bfloat16),
        "heads of 24 numbers": attend(head_dim=24),
        "heads of 24 numbers, decode": attend(DECODES, dtype=torch.bfloat16, head_dim=24),
        "window": attend(**window),
        "encoder": attend(attn_type=AttentionType.ENCODER_ONLY),
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
        found["zero scale"] = error_of_zero_scale()
    torch.save(found, sys.argv[1])
