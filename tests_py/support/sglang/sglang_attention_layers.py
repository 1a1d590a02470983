# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  stand-ins come before what imports them
"""Attention backend on pools of sglang, without an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cpattn.integrations.sglang import cpu_engine

cpu_engine.install()  # must come before any import of sglang
from sglang.srt.layers.radix_attention import RadixAttention
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
# A chunk behind a cached prefix, a whole prompt, and three decoded tokens; or only decoded tokens.
EXTENDS = ([40, 70, 1, 1, 1], [100, 70, 64, 33, 1])
DECODES = ([1, 1, 1], [100, 17, 64])
PROMPTS = ([40, 70, 1], [40, 70, 64])  # whole prompts, and a decoded token
FULL, SWA = 0, 1  # layers
CODE_SCALES = (0.5, 2.0)
SIZE, SWA_SIZE = 1280, 640  # tokens of pools


def make_pool(page_size: int, dtype: torch.dtype, windows: bool, **changes: Any) -> Any:
    """Make a pool with NaN in unwritten slots; with `windows`, also a smaller one for windows."""
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
    """Return slots of each request in its own pages; page 0 belongs to no request, as in sglang."""
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
        """Return the first kept token: pages before the windows of new tokens are freed."""
        return max(0, self.kv_lens[s] - self.q_lens[s] - WINDOW) // self.page_size * self.page_size

    def kept_lens(self) -> list[int]:
        return [n - self.first_kept(s) for s, n in enumerate(self.kv_lens)]

    def mapping(self) -> torch.Tensor:
        """Map slots to slots of the pool for windows, or 0."""
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
        """Return a mask that shows the keys in the chunk of a token."""
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
    """Return the answer of one layer, and the arguments of the oracle."""
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
    window = options.get("sliding_window_size")
    asked = {"softcap": options.get("logit_cap", 0.0), "window": window and (window, window)}
    if chunk_size is not None and options.get("use_irope"):
        asked["custom_mask"] = step.same_chunk(chunk_size)
    asked["causal"] = "attn_type" not in options
    return out.unflatten(1, (HEADS, head_dim)), step.oracle_inputs(sinks=sinks, **asked)


def attend_latents(lens: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return answer and arguments for absorbed MLA: the first 64 of 80 key numbers are values."""
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
