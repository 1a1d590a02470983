# SPDX-License-Identifier: Apache-2.0
"""Operators of CUDA devices with their signatures; they need no core of cpattn, so a machine with a
GPU runs them from the sources."""

from dataclasses import replace
from functools import cache

import torch

from cpattn_proof.conformance import SIGNATURES, Features

from .right_operators import RightOperator, sdpa_by

_HERE = "support.proof.conformance.gpu_operators"


sdpa_math, sdpa_flash = sdpa_by("MATH"), sdpa_by("FLASH_ATTENTION")
sdpa_efficient, sdpa_cudnn = sdpa_by("EFFICIENT_ATTENTION"), sdpa_by("CUDNN_ATTENTION")


@cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # the default unfuses it after eight forms
    return torch.compile(flex_attention, dynamic=True)


def flex(q, k, v, *, scale, attn_mask=None, is_causal=False, enable_gqa=False):
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b, h, i, j):
        return i >= j if attn_mask is None else attn_mask[b, 0, i, j]

    mask = None
    if is_causal or attn_mask is not None:
        mask = create_block_mask(visible, len(q), None, q.shape[2], k.shape[2], device=q.device)
    return _compiled_flex()(q, k, v, block_mask=mask, scale=scale, enable_gqa=enable_gqa)


def varlen(q, k, v, q_starts, kv_starts, longest_q, longest_kv, *, return_attn_probs,
           softmax_scale, causal, window_size=(-1, -1)):  # fmt: skip
    """Call `varlen_attn`, whose causal masks are windows without a right side."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    if causal:
        window_size = (window_size[0], 0)
    groups = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return varlen_attn(
        q, k, v, q_starts, kv_starts, longest_q, longest_kv, scale=softmax_scale,
        window_size=window_size, return_aux=AuxRequest(lse=True), **groups,
    )  # fmt: skip


#: Part of the signature that FlashInfer's kernels support with all options.
FLASHINFER = replace(
    SIGNATURES["flashinfer"],
    features=Features(
        kv_layouts=("NHD", "HND"), page_sizes=(1, 4, 16, 64), head_dims=(64,), dtypes=("bfloat16",),
        window=True, softcap=True, lse=True, far=True,
    ),
)  # fmt: skip


def __getattr__(name):
    if name != "FlashInferFa2":
        raise AttributeError(name)
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    class FlashInferFa2(BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, workspace, kv_layout):
            super().__init__(workspace, kv_layout, backend="fa2")

    return FlashInferFa2


#: Triton multiplies float32 as TF32, of ten bits, unless a kernel says otherwise.
TF32 = ("float32",)

GPU = {
    **{
        f"CUDA SDPA, {name}": RightOperator(f"{_HERE}:sdpa_{name}", "sdpa", "torch", (), known)
        for name, known in {"math": (), "efficient": (), "flash": (), "cudnn": ("unknown",)}.items()
    },
    "torch flex_attention": RightOperator(f"{_HERE}:flex", "sdpa", "torch"),
    "torch varlen_attn": RightOperator(
        f"{_HERE}:varlen",
        "flash_attn_varlen",
        "torch",
        ("paged", "softcap", "float32"),
        ("unknown",),
    ),
    "FlashInfer fa2": RightOperator(
        f"{_HERE}:FlashInferFa2",
        f"{_HERE}:FLASHINFER",
        "flashinfer-python",
        (),
        ("lse-finite-on-empty",),
    ),
    "sglang extend_attention_fwd": RightOperator(
        "support.sglang.sglang_triton:extend",
        "support.sglang.sglang_triton:EXTEND",
        "sglang",
        TF32,
        ("unknown", "lse-with-sink"),
    ),
    "sglang decode_attention_fwd": RightOperator(
        "support.sglang.sglang_triton:decode", "support.sglang.sglang_triton:DECODE", "sglang", TF32
    ),
    "vLLM unified_attention": RightOperator(
        "support.vllm.vllm_triton:attention", "support.vllm.vllm_triton:UNIFIED", "vllm", TF32
    ),
    "vLLM unified_attention, split": RightOperator(
        "support.vllm.vllm_triton:attention", "support.vllm.vllm_triton:SPLIT", "vllm", TF32
    ),
}
