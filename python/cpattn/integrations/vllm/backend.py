# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found", allow-subclassing-any
"""Attention backend for vLLM, computed by `cpattn.run_attention`.

The KV cache is vLLM's own, used in place: [num_blocks, num_kv_heads, block_size, 2 * head_size].
Each (block, head) has block_size rows of keys, then as many rows of values, in the model's dtype or
as FP8 codes with a scale of the layer. vLLM's own kernels use another key order inside a block, so
the choice of kernels is made once, when a layer is built: the base classes write and read the cache
of layers that are not covered. Layers of encoders have no cache: they read the keys of the batch.
With decode context parallelism a rank reads its share of the cache, and the new keys from the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)

from ..._core import AttentionPlan
from ...attention import plan_attention, run_attention
from ...kv import TokenInterleave
from ...merge import merge_states
from ...transfer import KVEntry
from .._ragged import RaggedPages
from .._torch_threads import follow_torch_threads
from .._visibility import visibility
from .cache import CODES, PagedCache
from .dcp import gather_heads, swap_parts

logger = init_logger("vllm.cpattn")  # vLLM shows only log records below its own logger


class CpattnBackend(CPUAttentionBackend):
    """CPU_ATTN with the metadata and the layers of this module."""

    @staticmethod
    def get_impl_cls() -> type[CpattnImpl]:
        return CpattnImpl

    @staticmethod
    def get_builder_cls() -> type[CpattnMetadataBuilder]:
        return CpattnMetadataBuilder


@dataclass
class CpattnMetadata(CPUAttentionMetadata):
    """Batch with its plans: one for all layers with equal heads and windows."""

    plans: dict[tuple[int, int, str], AttentionPlan] = field(default_factory=dict)
    interleave: int = 1  # consecutive tokens that a rank keeps

    def plan(self, impl: CpattnImpl, k_cache: torch.Tensor) -> AttentionPlan:
        """Return the plan of layers that read pages [blocks, num_kv_heads, block_size, dim]."""
        return self._plan(impl, "cache", self.block_table, k_cache.shape[0], k_cache.shape[2])

    def share_plan(self, impl: CpattnImpl, k_cache: torch.Tensor) -> AttentionPlan:
        """Return the plan of all ranks' heads over this rank's share of earlier cached tokens."""
        return self._plan(impl, "share", self.block_table, k_cache.shape[0], k_cache.shape[2])

    @cached_property
    def has_cached(self) -> bool:
        """Whether any sequence has cached tokens, the same on each rank, as exchanges require."""
        return bool(self._cached_lens.any())

    @cached_property
    def _cached_lens(self) -> Any:
        return self.seq_lens.numpy() - np.diff(self.query_start_loc.numpy())

    @cached_property
    def ragged(self) -> RaggedPages:
        """Keys of the batch, one sequence after the other, as pages."""
        ends = self.query_start_loc.numpy().astype(np.int64)
        return RaggedPages(ends[:-1], np.diff(ends), int(ends[-1]))

    def batch_plan(self, impl: CpattnImpl) -> AttentionPlan:
        """Return the plan of layers that read the keys of the batch."""
        pages = self.ragged
        return self._plan(impl, "batch", pages.block_tables, pages.num_pages, pages.page_size)

    def _plan(
        self, impl: CpattnImpl, keys: str, block_tables: Any, num_pages: int, page_size: int
    ) -> AttentionPlan:
        key = impl.num_heads, impl.sliding_window, keys
        if key not in self.plans:
            q_lens = np.diff(self.query_start_loc.numpy())
            num_heads, options = impl.num_heads, self._visibility(impl.sliding_window)
            if keys == "share":  # a new token sees each key of the share
                ranks = TokenInterleave(shard_size=impl.dcp_world_size, interleave=self.interleave)
                kv_lens = ranks.local_lens(self._cached_lens, impl.dcp_rank)
                num_heads, options = num_heads * impl.dcp_world_size, {"causal": False}
            else:
                kv_lens = q_lens if keys == "batch" else self.seq_lens.numpy()
            self.plans[key] = plan_attention(
                q_lens=q_lens, kv_lens=kv_lens, block_tables=block_tables, page_size=page_size,
                num_pages=num_pages, num_heads=num_heads, num_kv_heads=impl.num_kv_heads,
                head_dim=impl.head_size, **options,
            )  # fmt: skip
        return self.plans[key]

    def biases(self, impl: CpattnImpl) -> dict[str, Any]:
        """Return ALiBi as in vLLM's kernels, slope * (key - token) on both sides of a token.

        Before the token this is minus the distance. After it, the bias is positive.
        """
        slopes = impl.alibi_slopes
        if slopes is None or (self.causal and not impl.is_encoder):
            return {"alibi_slopes": slopes}
        most = max(self.max_query_len, self.max_seq_len)
        return {"relative_bias": slopes[:, None] * torch.arange(-most, most + 1)}

    def _visibility(self, sliding_window: int) -> dict[str, Any]:
        """Return the sides of a window, which counts the token; symmetric if not causal."""
        left = sliding_window - 1 if sliding_window > 0 else -1
        if self.dynamic_causal is None:
            return visibility(left, 0 if self.causal else left)
        side = left if left >= 0 else None
        return {"causal": self.dynamic_causal.bool(), "window": (side, side)}


class CpattnMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builder of `CpattnMetadata`, and of the base metadata if vLLM's own kernels need them."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.has_stock_layers = any(layer.impl.is_stock for layer in layers.values())
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        follow_torch_threads()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CpattnMetadata:
        batch = common_attn_metadata
        if self.has_stock_layers:
            return CpattnMetadata(**vars(super().build(common_prefix_len, batch, fast_build)))
        dynamic_causal = batch.causal if isinstance(batch.causal, torch.Tensor) else None
        return CpattnMetadata(
            num_actual_tokens=batch.num_actual_tokens, max_query_len=batch.max_query_len,
            query_start_loc=batch.query_start_loc, max_seq_len=batch.max_seq_len,
            seq_lens=batch.seq_lens, block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping, scheduler_metadata=None,
            causal=batch.causal is True and not self.is_cross_attention,
            dynamic_causal=dynamic_causal, interleave=self.interleave,
        )  # fmt: skip


def _not_covered(impl: CPUAttentionBackendImpl) -> str | None:
    """Return why vLLM's own kernels run a layer, or None; equal for layers that share a cache."""
    config = get_current_vllm_config()
    if impl.is_encoder:
        return None  # such a layer has no cache
    own_dtype = str(config.model_config.dtype).removeprefix("torch.")
    if impl.kv_cache_dtype not in ("auto", own_dtype, *CODES):
        return f"a KV cache in {impl.kv_cache_dtype}"
    if config.kv_transfer_config is not None:
        return "transfer of the KV cache, whose receiver may expect the other order of keys"
    return None


def _not_shared(impl: CpattnImpl) -> str | None:
    """Return why ranks cannot share the cache of a layer, or None."""
    if impl.sliding_window > 0:
        return "a sliding window"
    if impl.alibi_slopes is not None:
        return "ALiBi"
    if impl.sinks is not None:
        return "sinks"
    return "a cache of FP8" if impl.kv_cache_dtype in CODES else _not_covered(impl)


class CpattnImpl(CPUAttentionBackendImpl):
    """Attention of one layer."""

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_encoder = self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        reason = _not_covered(self)
        self.is_shared = self.dcp_world_size > 1 and not self.is_encoder
        if self.is_shared and (unshared := _not_shared(self)):
            raise NotImplementedError(
                f"cpattn: --decode-context-parallel-size of layers with {unshared}"
            )
        self._code = CODES.get(self.kv_cache_dtype)
        self.is_stock = reason is not None
        self._cache: PagedCache | None = None
        if self.is_stock:
            logger.warning_once("cpattn does not cover %s; vLLM's own kernels do it.", reason)
        else:
            logger.info_once("cpattn computes attention.")

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value [num_tokens, num_kv_heads, head_size] to their slots; -1 skips."""
        if self.is_stock:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif not self.is_encoder:
            cache = self._cache_of(kv_cache)
            cache.write(key, value, slot_mapping, **self._scales(layer))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CpattnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of query [num_tokens, num_heads, head_size] into `output`."""
        if self.is_stock or attn_metadata is None:  # None: a warm-up
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        options: dict[str, Any] = {}
        if self.is_encoder or self.is_shared:
            plan, pages = attn_metadata.batch_plan(self), attn_metadata.ragged
            keys, values = (pages.of(x[: plan.num_rows]) for x in (key, value))
        else:
            cache = self._cache_of(kv_cache)
            plan, keys, values = attn_metadata.plan(self, cache.k), cache.k, cache.v
            options = {"kv_layout": "HND", **self._scales(layer)}
        rows = plan.num_rows  # the tensors may be padded
        result = run_attention(
            plan, query[:rows], keys, values, **options, scale=self.scale,
            softcap=self.logits_soft_cap, **attn_metadata.biases(self),
            sinks=None if self.sinks is None else self.sinks.float(), out=output[:rows],
            return_lse=self.is_shared,
        )  # fmt: skip
        if isinstance(result, tuple) and attn_metadata.has_cached:
            self._merge_shares(query[:rows], kv_cache, attn_metadata, *result)
        return output

    def _merge_shares(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CpattnMetadata,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merge the results of the ranks' cache shares into those of the new tokens, in place."""
        cache = self._cache_of(kv_cache)
        share, share_lse = run_attention(
            attn_metadata.share_plan(self, cache.k), gather_heads(query), cache.k, cache.v,
            kv_layout="HND", scale=self.scale, softcap=self.logits_soft_cap, return_lse=True,
        )  # fmt: skip
        outs, lses = swap_parts(share), swap_parts(share_lse)
        merge_states([out, *outs], [lse, *lses], out=out, lse=lse)

    def kv_entry(self, layer_id: int, kv_cache: torch.Tensor) -> KVEntry:
        """Describe the blocks of this layer's cache to a peer that receives keys and values.

        A block has keys and values of each head in turn, so it is one buffer, sent whole. Its
        `layout_tag` tells rows from the layout of vLLM's own kernels.
        """
        _, _, block_size, width = kv_cache.shape
        order = "rows"
        if self.is_stock:
            dtype = get_current_vllm_config().model_config.dtype
            order = _get_attn_isa(dtype, block_size, width // 2, self.kv_cache_dtype)
        blocks = kv_cache.view(self._code or kv_cache.dtype)
        return KVEntry.from_tensor(layer_id, "k", blocks, layout_tag=f"vllm cpu {order}")

    def _scales(self, layer: Any) -> dict[str, Any]:
        """Return the scales of codes; a checkpoint may have scales without use in the cache."""
        if self._code is None:
            return {}
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}

    def _cache_of(self, kv_cache: torch.Tensor) -> PagedCache:
        """Return the paged views, made once per cache tensor: vLLM keeps passing the same one."""
        if self._cache is None or self._cache.tensor is not kv_cache:
            self._cache = PagedCache(kv_cache, self._code)
        return self._cache
