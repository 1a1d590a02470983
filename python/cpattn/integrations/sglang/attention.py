# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found", allow-subclassing-any
"""Attention backend for sglang on a CPU, computed by `cpattn.run_attention`.

The KV cache is sglang's own, read in place: keys and values of each layer are [slots, num_kv_heads,
head_dim], and the slots of a page are adjacent. A row of `req_to_token` lists the slots of a
request; every page_size-th slot gives the page. Layers with sliding windows may have a smaller pool
with its own slots. A pool of MLA has latents [slots, 1, kv_lora_rank + qk_rope_head_dim], which
begin with the values; prefill is absorbed there like decode. With an encoder beside a decoder, a
request's row begins with the slots of the encoder's keys.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, NoReturn

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.cp.base import get_cp_strategy
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.runtime_context import get_flags, get_memory, get_parallel, get_schedule, get_spec

from ... import _core
from ..._core import AttentionPlan
from ...attention import plan_attention, run_attention
from .._torch_threads import follow_torch_threads

_SERVED = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CODES: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, torch.float8_e5m2)

_logger = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """Properties that layers must have in common to share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: tuple[int, int] | None
    in_window_pool: bool
    causal: bool
    in_chunks: bool
    of_encoder: bool


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"--attention-backend cpattn does not serve {what}; sglang's own backend for a CPU is "
        "--attention-backend torch_native"
    )


class CpattnAttnBackend(TorchNativeAttnBackend):
    """Attention of decoders, encoders and cross attention; sglang itself writes the KV cache.

    Parameters
    ----------
    runner : sglang's ModelRunner

    Raises
    ------
    NotImplementedError
        If the model or an argument of the server is not supported; raised before the first request,
        with its name.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._page_size: int = runner.page_size
        self._chunk_size: int | None = runner.attention_chunk_size
        self._plans: dict[_Kind, AttentionPlan] = {}
        _check_runner(runner)
        if type(self.token_to_kv_pool) is MLATokenToKVPool:
            # Else models expand the keys of a prompt without a prefix, and cache latents
            # separately.
            attention_backend_handler.AttentionBackendRegistry.register(
                "cpattn", attention_backend_handler._dispatch_mla_subtype
            )
        follow_torch_threads()
        _logger.info(
            "cpattn computes attention: %s, pages of %d, %d threads",
            str(runner.kv_cache_dtype).removeprefix("torch."),
            self._page_size,
            _core.default_num_threads(),
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begin a forward pass; the first layer of each kind makes its plan."""
        super().init_forward_metadata(forward_batch)
        self._plans.clear()

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Attend with q [num_tokens, num_heads * head_dim] to [num_tokens, num_heads * v_head_dim].

        Given `k` and `v` [num_tokens, num_kv_heads, dim] are written first; layers that share the
        cache of another layer have none.
        """
        _check_call(layer, forward_batch, others)
        if k is not None and not save_kv_cache:
            _refuse("keys that are not in the KV cache")
        scales = self._scales(layer)
        split = forward_batch.attn_cp_metadata
        if k is not None and v is not None and split is not None:
            # Rows of all ranks, in token order: each rank has the whole cache.
            get_cp_strategy().materialize_full_kv(
                forward_batch, layer, k, v, swa_loc=self.swa_out_cache_loc
            )
        elif k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            if _reads_encoder(layer, forward_batch):
                where = KVWriteLoc(forward_batch.encoder_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, **scales)
        num_heads, v_head_dim = layer.tp_q_head_num, layer.v_head_dim
        result = out = q.new_empty((len(q), num_heads * v_head_dim))
        if split is not None:  # further rows pad the rank's share
            num_tokens = split.total_q_prev_tokens + split.total_q_next_tokens
            result[num_tokens:] = 0
            q, out = q[:num_tokens], out[:num_tokens]
        run_attention(
            self._plan(layer, forward_batch), q.reshape(-1, num_heads, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id), **scales, scale=layer.scaling,
            softcap=layer.logit_cap or 0.0, sinks=None if sinks is None else sinks.float(),
            out=out.view(-1, num_heads, v_head_dim),
        )  # fmt: skip
        return result

    forward_extend = forward_decode = _attend

    def _scales(self, layer: Any) -> dict[str, Any]:
        """Return the scales of codes; a checkpoint may have scales without use in the cache."""
        if self.token_to_kv_pool.dtype not in _CODES:
            return {}
        scales = {"k_scale": layer.k_scale_float, "v_scale": layer.v_scale_float}
        return {name: 1.0 if scale is None else scale for name, scale in scales.items()}

    def _plan(self, layer: Any, forward_batch: Any) -> AttentionPlan:
        width = layer.sliding_window_size
        kind = _Kind(
            num_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
            window=(width, width) if width >= 0 else None,
            in_window_pool=self._in_window_pool(layer.layer_id),
            causal=layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention,
            in_chunks=self._chunk_size is not None and layer.use_irope,
            of_encoder=_reads_encoder(layer, forward_batch),
        )
        if kind not in self._plans:
            self._plans[kind] = self._make_plan(kind, layer, forward_batch)
        return self._plans[kind]

    def _in_window_pool(self, layer_id: int) -> bool:
        pool = self.token_to_kv_pool
        return isinstance(pool, SWAKVPool) and pool.layers_mapping[layer_id][1]

    def _make_plan(self, kind: _Kind, layer: Any, forward_batch: Any) -> AttentionPlan:
        """Plan the whole batch; a window of sglang, as of cpattn, excludes the token itself."""
        kv_lens, encoder_lens = forward_batch.seq_lens, forward_batch.encoder_lens
        decodes = forward_batch.forward_mode.is_decode()
        q_lens = torch.ones_like(kv_lens) if decodes else forward_batch.extend_seq_lens
        page_size, first, mask = self._page_size, torch.zeros_like(kv_lens), None
        if kind.of_encoder:
            kv_lens, mask = encoder_lens, forward_batch.cross_attention_custom_mask
        elif encoder_lens is not None:
            first = encoder_lens
            if (first % page_size).any():  # then sequences begin within a page
                page_size = 1
        columns = first[:, None] + torch.arange(0, int(kv_lens.max()), page_size)
        table = self.req_to_token_pool.req_to_token
        columns = columns.clamp(max=table.shape[1] - 1)  # not read beyond the end of a sequence
        slots = table[forward_batch.req_pool_indices[:, None], columns]
        if kind.in_window_pool:
            # Pages before the window may have been freed: their slots are 0, where there are no
            # keys, and are not visible.
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        split = forward_batch.attn_cp_metadata
        if split is not None:  # the first shares of all requests, then the second shares
            q_lens = split.actual_seq_q_combined_tensor
            kv_lens = split.kv_len_combined_tensor
            slots = slots.repeat(2, 1)
        tables = slots // page_size
        if kind.in_chunks:
            assert self._chunk_size is not None
            q_lens, kv_lens, tables = _in_chunks(
                q_lens, kv_lens, tables, self._chunk_size, page_size
            )
        num_slots = len(self.token_to_kv_pool.get_key_buffer(layer.layer_id))
        return plan_attention(
            q_lens=q_lens, kv_lens=kv_lens, block_tables=tables, page_size=page_size,
            num_pages=num_slots // page_size, num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads, head_dim=kind.head_dim, v_head_dim=kind.v_head_dim,
            causal=kind.causal, window=kind.window,
            custom_mask=None if mask is None else mask.bool(),
        )  # fmt: skip


def _reads_encoder(layer: Any, forward_batch: Any) -> bool:
    """Tell whether the keys belong to an encoder beside the decoder.

    sglang also marks layers of pure encoders as cross attention, in batches without encoders.
    """
    return layer.is_cross_attention and forward_batch.encoder_lens is not None


def _in_chunks(
    q_lens: torch.Tensor, kv_lens: torch.Tensor, tables: torch.Tensor, size: int, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return lengths and pages of sequences that are chunks of `size` tokens with new ones in them.

    A token sees the tokens of its chunk up to itself, as in Llama 4.
    """
    first = kv_lens - q_lens
    counts = (kv_lens - 1) // size - first // size + 1
    sequence = torch.repeat_interleave(counts)
    number = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
    begin = (first[sequence] // size + number) * size
    end = torch.minimum(begin + size, kv_lens[sequence])
    columns = begin[:, None] // page_size + torch.arange(size // page_size)
    pages = tables[sequence[:, None], columns.clamp(max=tables.shape[1] - 1)]
    return end - torch.maximum(begin, first[sequence]), end - begin, pages


def _check_runner(runner: Any) -> None:
    """Refuse unsupported servers, by what is known when they start."""
    parallel, config = get_parallel(), runner.model_config
    if str(runner.device) != "cpu":
        _refuse(f"the device {runner.device}")
    if get_spec().speculative_algorithm is not None:
        _refuse("speculative decoding")
    if get_flags().capture.enable_torch_compile:  # on a CPU that is a graph for each batch size
        _refuse("--enable-torch-compile")
    if parallel.attn_cp_size > 1:
        _check_context_parallel(parallel, runner)
    if parallel.attn_dcp_size > 1:
        _refuse("context parallelism of decoding (--dcp-size)")
    if runner.server_args.enable_dp_attention:
        _refuse("--enable-dp-attention")
    chunk_size = runner.attention_chunk_size
    if chunk_size is not None and chunk_size % runner.page_size:
        _refuse(f"chunks of {chunk_size} tokens, as of Llama 4, in pages of {runner.page_size}")
    if chunk_size is not None and parallel.attn_cp_size > 1:
        _refuse("context parallelism (--attn-cp-size) of attention in chunks")
    if config.is_encoder_decoder and parallel.attn_cp_size > 1:
        _refuse("context parallelism (--attn-cp-size) of models with an encoder and a decoder")
    if runner.dtype not in _FLOATS:
        _refuse(f"models in {runner.dtype}")
    pool = runner.token_to_kv_pool
    pools = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is SWAKVPool else (pool,)
    for part in pools:
        _check_pool(part, runner.dtype)


def _check_context_parallel(parallel: Any, runner: Any) -> None:
    if not parallel.enable_prefill_cp:
        _refuse("context parallelism (--attn-cp-size) without --enable-prefill-cp")
    if parallel.cp_strategy != "zigzag":
        _refuse(f"--cp-strategy {parallel.cp_strategy}, only zigzag")
    if type(runner.token_to_kv_pool) is MLATokenToKVPool:
        _refuse("context parallelism (--attn-cp-size) of MLA")


def _check_pool(pool: Any, dtype: torch.dtype) -> None:
    if type(pool) is MHATokenToKVPool:
        if pool.kv_cache_layout != "nhd" or pool.is_quantized_kv_cache:
            _refuse("a KV cache in another layout than [slots, heads, head_dim]")
        codes = _CODES
    elif type(pool) is MLATokenToKVPool:
        if pool.use_dsa:
            _refuse("sparse attention (DSA)")
        codes = ()
    else:
        _refuse(f"a KV cache of the type {type(pool).__name__}")
    if pool.dtype != dtype and pool.dtype not in codes:
        _refuse(f"a KV cache in {pool.dtype} of a model in {dtype}")


def _check_call(layer: Any, forward_batch: Any, others: dict[str, Any]) -> None:
    """Refuse unsupported calls, by what only a layer or a batch shows."""
    if forward_batch.forward_mode not in _SERVED:
        _refuse(f"batches of the mode {forward_batch.forward_mode.name}")
    if layer.is_cross_attention and layer.sliding_window_size >= 0:
        _refuse("windows of cross attention, whose queries have no positions among the keys")
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL and not _has_whole_prompts():
        _refuse(
            "prompts that see themselves in both directions and are cut, or have a cached prefix: "
            "it needs --chunked-prefill-size -1 --disable-radix-cache"
        )
    bidirectional = layer.is_cross_attention or layer.attn_type != AttentionType.DECODER
    if bidirectional and forward_batch.attn_cp_metadata is not None:
        _refuse("context parallelism (--attn-cp-size) of encoders and prompts of both directions")
    if layer.pos_encoding_mode != "NONE" or layer.xai_temperature_len > 0:
        _refuse("positions inside attention, as of Grok")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        _refuse(f"the softcap {layer.logit_capping_method}")
    if forward_batch.mha_return_lse:
        _refuse("results with their log-sum-exp")
    asked_for = sorted(name for name, value in others.items() if value is not None)
    if asked_for:
        _refuse(f"the arguments {', '.join(asked_for)} of a layer")


def _has_whole_prompts() -> bool:
    """Tell whether all tokens of a prompt are new ones of one batch."""
    return get_schedule().chunked_prefill_size == -1 and get_memory().disable_radix_cache
