# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found", allow-subclassing-any
"""Multi-head latent attention of vLLM on CPU, done by `cpattn.run_attention`.

The cache is vLLM's own, used in place: [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], a
latent and a rotated key for each token. Decoded tokens attend to it with absorbed queries, for
which the latents are also the values. Prompts attend to their own expanded keys and values without
reading the cache: for these models vLLM neither splits prompts nor keeps prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from ..._core import AttentionPlan
from ...attention import plan_attention, run_attention
from ...kv import write_pages
from .._ragged import RaggedPages
from .._torch_threads import follow_torch_threads

logger = init_logger("vllm.cpattn")  # vLLM shows only log records below its own logger


class CpattnMLABackend(CPUMLABackend):
    """CPU_MLA with the metadata and the layers of this module."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        sizes: list[int] = MLACommonBackend.get_supported_head_sizes()
        return sizes

    @staticmethod
    def get_impl_cls() -> type[CpattnMLAImpl]:
        return CpattnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CpattnMLAMetadataBuilder]:
        return CpattnMLAMetadataBuilder


@dataclass
class Prompts:
    """Attention of the prompts of a batch to their own keys."""

    pages: RaggedPages
    plan: AttentionPlan


@dataclass
class CpattnMLAMetadata(MLACommonMetadata):
    """Batch with its plans, which all layers with equally many heads share."""

    decode_plans: dict[int, AttentionPlan] = field(default_factory=dict)
    prompts: dict[int, Prompts] = field(default_factory=dict)

    def decode_plan(self, impl: CpattnMLAImpl, cache: torch.Tensor) -> AttentionPlan:
        """Return the plan of decoded tokens, whose absorbed queries read latents as one KV head."""
        if impl.num_heads not in self.decode_plans:
            num_pages, page_size, head_dim = cache.shape
            self.decode_plans[impl.num_heads] = plan_attention(
                q_lens=[1] * self.num_decodes, kv_lens=self.decode.seq_lens,
                block_tables=self.decode.block_table, page_size=page_size, num_pages=num_pages,
                num_heads=impl.num_heads, num_kv_heads=1, head_dim=head_dim,
                v_head_dim=impl.kv_lora_rank,
            )  # fmt: skip
        return self.decode_plans[impl.num_heads]

    def prompts_of(self, impl: CpattnMLAImpl) -> Prompts:
        if impl.num_heads not in self.prompts:
            ends = self.prefill.query_start_loc.numpy().astype(np.int64)
            lens = np.diff(ends)
            pages = RaggedPages(ends[:-1], lens, int(ends[-1]))
            plan = plan_attention(
                q_lens=lens, kv_lens=lens, block_tables=pages.block_tables,
                page_size=pages.page_size, num_pages=pages.num_pages, num_heads=impl.num_heads,
                num_kv_heads=impl.num_heads, head_dim=impl.qk_head_dim, v_head_dim=impl.v_head_dim,
            )  # fmt: skip
            self.prompts[impl.num_heads] = Prompts(pages, plan)
        return self.prompts[impl.num_heads]


class CpattnMLAMetadataBuilder(MLACommonMetadataBuilder[CpattnMLAMetadata]):
    """Builder of `CpattnMLAMetadata`."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, CpattnMLAMetadata)
        follow_torch_threads()


class CpattnMLAImpl(CPUMLAImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        logger.info_once("cpattn computes attention.")

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write latents [num_tokens, rank] and keys [num_tokens, 1, dim]; slot -1 skips.

        vLLM 0.33 passes `skip_scale` for FP8 caches, which are not used here.
        """
        if kv_cache.numel() == 0:  # a warm-up
            return
        slots = slot_mapping.flatten()
        latents, keys = kv_cache.unsqueeze(1).split([self.kv_lora_rank, k_pe.shape[-1]], dim=-1)
        rows = kv_c_normed[: len(slots)].unsqueeze(1)
        write_pages(slots, rows, latents, k_pe[: len(slots)], keys, kv_layout="HND")

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CpattnMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend to latents for decoded tokens; return [num_tokens, num_heads, kv_lora_rank]."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        cache = kv_c_and_k_pe_cache.unsqueeze(2)  # one KV head
        out = run_attention(
            attn_metadata.decode_plan(self, kv_c_and_k_pe_cache), q, cache,
            cache[..., : self.kv_lora_rank], scale=self.scale,
        )  # fmt: skip
        return out, None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CpattnMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend for prompts, into `output` [num_tokens, num_heads * v_head_dim]."""
        if attn_metadata.prefill.chunked_context is not None:
            raise NotImplementedError(
                "cpattn: prompts of MLA behind cached tokens; vLLM's own CPU_MLA has none, either"
            )
        heads = self.kv_b_proj(kv_c_normed)[0].unflatten(-1, (self.num_heads, -1))
        k_nope, v = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = self._concat_k_nope_k_pe(k_nope, k_pe)
        prompts = attn_metadata.prompts_of(self)
        run_attention(
            prompts.plan, q, prompts.pages.of(k), prompts.pages.of(v), scale=self.scale,
            out=output.unflatten(-1, (self.num_heads, self.v_head_dim)),
        )  # fmt: skip
