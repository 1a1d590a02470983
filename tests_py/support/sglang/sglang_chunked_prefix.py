# SPDX-License-Identifier: Apache-2.0
"""Attention of DeepSeek models to a cached prefix, chunk by chunk, as an operator: the code of the
installed sglang, with its Triton kernels for indices and for the merge (see `Kernel`).

All matrices are the identity, unlike sglang's: a latent is the keys and values of all heads.
FlashInfer's kernels need a GPU, so this library's paged prefill over pages of one token stands in,
with the names and the log-sum-exp of FlashInfer, which its documents say is to base 2.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cpattn.integrations.flashinfer import BatchPrefillWithPagedKVCacheWrapper
from cpattn_proof.conformance.signatures import Answer, Features, Signature
from support.sglang import sglang_planning
from support.sglang.sglang_planning import srt_modules
from support.stand_ins import stand_ins_for_what_lacks

MODULES = srt_modules(
    "backend=layers.attention.flashinfer_mla_backend batch=model_executor.forward_batch_info",
    "chunks=model_executor.forward_batch_deepseek_mha_mixin",
    "context=model_executor.forward_context merge=layers.attention.merge_state",
    "mha=models.deepseek_common.attention_forward_methods.forward_mha",
    "pools=mem_cache.memory_pool radix=layers.radix_attention runtime=runtime_context",
)
MODULES["indices"] = "sglang.kernels.ops.attention.kv_indices"
MODULES["kernels"] = "sglang.kernels.ops.attention.merge_state"


@functools.cache
def load() -> SimpleNamespace:
    sglang_planning.load()
    with stand_ins_for_what_lacks():
        modules = {key: importlib.import_module(name) for key, name in MODULES.items()}
    sglang = SimpleNamespace(**modules)
    sglang.backend.BatchPrefillWithRaggedKVCacheWrapper = RaggedWrapper
    sglang.kernels.triton = SimpleNamespace(next_power_of_2=next_power_of_2)
    sglang.kernels.merge_state_kernel = Kernel(sglang.kernels.merge_state_kernel)
    name = "create_chunked_prefix_cache_kv_indices"
    setattr(sglang.chunks, name, Kernel(getattr(sglang.indices, name)))
    return sglang


class RaggedWrapper:
    """Stand-in for FlashInfer's `BatchPrefillWithRaggedKVCacheWrapper` as sglang calls it."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        self._layout, self._planned = layout, {}

    def begin_forward(self, **planned: Any) -> None:
        self._planned = planned

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
        causal: bool, sm_scale: float, logits_soft_cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        planned = dict(self._planned)
        ends, num_kv_heads = planned.pop("kv_indptr"), planned.pop("num_kv_heads")
        planned.pop("causal")
        wrapper = BatchPrefillWithPagedKVCacheWrapper(None, self._layout)
        wrapper.plan(
            planned.pop("qo_indptr"), ends, torch.arange(len(k), dtype=torch.int32),
            torch.ones(len(ends) - 1, dtype=torch.int32), planned.pop("num_qo_heads"),
            num_kv_heads, planned.pop("head_dim_qk"), 1, causal=causal, sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap, **planned,
        )  # fmt: skip
        return wrapper.run(q, (k[:, None], v[:, None]), return_lse=True)


SIGNATURE = Signature(
    "sglang, chunked prefix",
    Features(
        page_sizes=(1, 4, 16), causal=(True,), empty=False, softcap=True, v_head_dim=True, lse=True
    ),
    lambda operator, tensors: operator(tensors),
)


def attention(tensors: Any, *, mended: bool) -> Answer:
    """Attend by a prefill over pages; all but the new tokens are a cached prefix.

    If `mended`, the runner converts the log-sum-exp of FlashInfer to base e, as in sglang's pull
    request 35045.
    """
    sglang, case = load(), tensors.case
    prefixes = [kv - q for q, kv in zip(tensors.q_lens, tensors.kv_lens, strict=True)]
    if not any(prefixes):
        raise NotImplementedError("no cached prefix: sglang does not go this way")
    k_cache, v_cache = tensors.caches()
    group = case.num_heads // case.num_kv_heads
    rows = [x.flatten(0, 1).repeat_interleave(group, dim=1) for x in (k_cache, v_cache)]
    backend = _make_backend(sglang, case, rows, _token_slots(tensors))
    layer, batch = _make_layer(sglang, case), _make_forward_batch(sglang, tensors, prefixes)
    q = tensors.q
    k, v = (x.repeat_interleave(group, dim=1) for x in tensors.new())
    merged: list[Any] = []
    recorded = _recording(sglang.merge.merge_state, merged)
    with (
        mock.patch.object(sglang.merge, "merge_state", recorded),
        mock.patch.object(*_runner_forward(sglang, mended)),
        sglang.runtime.get_context().override_server_args(),
        sglang.context.forward_context(sglang.context.ForwardContext(backend)),
    ):
        out = layer.forward_normal_chunked_kv_core(q, k.contiguous(), v.contiguous(), batch)
    _, lse = merged[-1]
    return Answer(out.view(-1, case.num_heads, case.v_head_dim), lse)


def _token_slots(tensors: Any) -> torch.Tensor:
    """Return ``req_to_token``: the slot of each token of each request."""
    size, tables = tensors.case.page_size, tensors.block_tables.long()
    within = torch.arange(tables.shape[1] * size)
    return (tables[:, within // size] * size + within % size).int()


def _recording(function: Any, results: list[Any]) -> Any:
    def recorded(*arguments: Any) -> Any:
        results.append(function(*arguments))
        return results[-1]

    return recorded


def _runner_forward(sglang: SimpleNamespace, mended: bool) -> tuple[type, str, Any]:
    """Return the arguments of `mock.patch.object` for the runner."""
    runner = sglang.backend.FlashInferMhaChunkKVRunner
    shipped = runner.forward

    def to_base_e(*arguments: Any) -> Any:
        out, lse = shipped(*arguments)
        return out, lse * math.log(2)

    return runner, "forward", to_base_e if mended else shipped


def _make_backend(sglang: SimpleNamespace, case: Any, rows: list[Any], slots: Any) -> Any:
    """Make a `FlashInferMLAAttnBackend` over a pool, without buffers for graphs and decoding."""
    latents = torch.cat(rows, dim=-1).flatten(1)[:, None]
    pool = sglang.pools.MLATokenToKVPool(
        size=len(latents), page_size=1, dtype=latents.dtype, kv_lora_rank=latents.shape[-1],
        qk_rope_head_dim=0, layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    pool.kv_buffer[0][: len(latents)] = latents
    backend = object.__new__(sglang.backend.FlashInferMLAAttnBackend)
    batch_size = len(case.q_lens)
    vars(backend).update(
        enable_chunk_kv=True,
        fmha_backend="auto",
        kv_index_translator=SimpleNamespace(
            reads_are_translated=False, translate_dcp_read_ids=lambda indices: indices
        ),
        kv_indptr=torch.zeros(batch_size + 1, dtype=torch.int32),
        qo_indptr=torch.zeros(batch_size + 1, dtype=torch.int32),
        prefill_wrapper_ragged=RaggedWrapper(torch.empty(0), "NHD", "auto"),
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        token_to_kv_pool=pool,
        workspace_buffer=torch.empty(0),
    )
    runner = SimpleNamespace(
        dtype=latents.dtype,
        model_config=SimpleNamespace(
            num_attention_heads=case.num_heads, qk_nope_head_dim=case.head_dim,
            qk_rope_head_dim=0, v_head_dim=case.v_head_dim,
        ),
    )  # fmt: skip
    with sglang.runtime.get_context().override_server_args():
        backend.mha_chunk_kv_cache = sglang.backend.FlashInferMhaChunkKVRunner(runner, backend)
    return backend


def _make_layer(sglang: SimpleNamespace, case: Any) -> Any:
    """Make an attention layer of DeepSeek models whose matrices are the identity."""
    layer = sglang.mha.DeepseekMHAForwardMixin()
    vars(layer).update(
        attn_mha=sglang.radix.RadixAttention(
            case.num_heads, case.head_dim, case.scale, case.num_heads, layer_id=0,
            logit_cap=case.softcap, v_head_dim=case.v_head_dim,
        ),
        kv_b_proj=lambda latents: (latents,),
        kv_lora_rank=case.num_heads * (case.head_dim + case.v_head_dim),
        num_local_heads=case.num_heads,
        o_proj=lambda out: (out, None),
        qk_nope_head_dim=case.head_dim,
        qk_rope_head_dim=0,
        v_head_dim=case.v_head_dim,
    )  # fmt: skip
    return layer


def _make_forward_batch(sglang: SimpleNamespace, tensors: Any, prefixes: list[int]) -> Any:
    news, kv_lens = list(tensors.q_lens), torch.tensor(tensors.kv_lens)
    lens = {"extend_seq_lens": torch.tensor(news), "extend_seq_lens_cpu": news}
    lens |= {"extend_prefix_lens": torch.tensor(prefixes), "extend_prefix_lens_cpu": prefixes}
    lens |= {"seq_lens": kv_lens, "seq_lens_cpu": kv_lens, "seq_lens_sum": int(kv_lens.sum())}
    zeros = torch.zeros(sum(news), dtype=torch.int64)
    options = {"forward_mode": sglang.batch.ForwardMode.EXTEND, "batch_size": len(kv_lens)}
    options |= {"input_ids": zeros, "req_pool_indices": torch.arange(len(kv_lens))}
    options |= {"out_cache_loc": zeros.clone(), "extend_num_tokens": sum(news)}
    return sglang.batch.ForwardBatch(**options, **lens)


# Kernels for Triton, run program by program on CPU tensors: torch loads, computes and stores, with
# the kernel's element types and roundings, without a compiler.


class Pointer:
    """Pointer to elements of a tensor by their offsets."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"Pointer: tensor must be contiguous, got strides {tensor.stride()}")
        self.elements, self.offset = tensor.view(-1), torch.as_tensor(offset)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.elements, self.offset + offset)

    def seen(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return offsets, which are 0 if hidden, and the mask."""
        shown = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        at = torch.where(shown, self.offset, 0)
        if ((at < 0) | (at >= max(len(self.elements), 1)))[shown].any():
            raise IndexError(f"offsets must be below {len(self.elements)}, got {at.max()}")
        return at, shown


class Language:
    """Names of ``triton.language`` for the running program."""

    int32 = torch.int32
    arange = staticmethod(torch.arange)
    exp = staticmethod(lambda x: torch.exp(torch.as_tensor(x)))
    log = staticmethod(lambda x: torch.log(torch.as_tensor(x)))
    cdiv = staticmethod(lambda a, b: -(-int(a) // b))
    maximum = staticmethod(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)))

    def __init__(self, grid: tuple[int, ...], program: tuple[int, ...]) -> None:
        self.num_programs = lambda axis: grid[axis]
        self.program_id = lambda axis: program[axis]

    def load(self, pointer: Pointer, mask: Any = None) -> torch.Tensor:
        at, shown = pointer.seen(mask)
        if not len(pointer.elements):
            return torch.zeros(at.shape, dtype=pointer.elements.dtype)
        return torch.where(shown, pointer.elements[at], 0)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        at, shown = pointer.seen(mask)
        value = torch.as_tensor(value).to(pointer.elements.dtype).expand(at.shape)
        pointer.elements[at[shown]] = value[shown]


class Kernel:
    """Stand-in for ``@triton.jit`` of a function: ``kernel[grid](...)`` runs all programs."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = getattr(function, "fn", function)  # an installed Triton has wrapped it

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            given = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            for program in itertools.product(*map(range, grid)):
                with mock.patch.dict(self.function.__globals__, tl=Language(grid, program)):
                    self.function(*given)

        return launch


def next_power_of_2(n: int) -> int:
    return 1 << math.ceil(math.log2(n)) if n > 1 else 1
