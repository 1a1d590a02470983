# SPDX-License-Identifier: Apache-2.0
"""Decisions of sglang from integers only: top-k transforms, and receivers of KV buffers.

Functions with an `original` wrap sglang's own functions and call them if there is nothing to add.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ... import _core
from ...transfer.sglang_0_5_23.pages import (
    group_concurrent_contiguous as group_concurrent_contiguous,
)
from ...transfer.sglang_0_5_23.pointers import get_mha_kv_ptrs_with_pp, get_mla_kv_ptrs_with_pp


@functools.cache
def _from_sglang(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"sglang.srt.{module}"), name)


def get_topk_transform_method(self: Any, forward_mode: Any = None) -> Any:
    """Return the unit in which the attention of a batch expects its top-k indices.

    Parameters
    ----------
    self : DeepseekSparseAttnBackend
        Object with ``dsa_kv_cache_store_fp8`` and ``dsa_prefill_impl``.
    forward_mode : ForwardMode of sglang, optional

    Returns
    -------
    TopkTransformMethod of sglang

    Raises
    ------
    TypeError
        If `forward_mode` is no ForwardMode.

    Examples
    --------
    >>> get_topk_transform_method(backend, forward_mode)  # doctest: +SKIP
    """
    method = _from_sglang("layers.attention.dsa.dsa_topk_backend", "TopkTransformMethod")
    return method(
        _core.get_topk_transform_method(
            forward_mode, bool(self.dsa_kv_cache_store_fp8), self.dsa_prefill_impl
        )
    )


def record_kv_layers(
    original: Callable[..., None],
    kv_args: Any,
    token_to_kv_pool: Any,
    draft_token_to_kv_pool: Any = None,
    total_kv_layers: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Record in ``kv_args.total_kv_layers`` the number that ``setup_state_kv_args`` drops.

    This is for pools with K and V, or a latent, in every layer. A hybrid model has them in some
    layers only, and 0 stands for an unknown number.
    """
    original(kv_args, token_to_kv_pool, draft_token_to_kv_pool, total_kv_layers, *args, **kwargs)
    kinds = tuple(
        _from_sglang("mem_cache.memory_pool", name)
        for name in ("MHATokenToKVPool", "MLATokenToKVPool")
    )
    has_all_layers = isinstance(token_to_kv_pool, kinds)
    kv_args.total_kv_layers = total_kv_layers if has_all_layers else 0


def strict_mha_kv_ptrs(
    original: Callable[..., Any], self: Any, src_kv_ptrs: list[int], dst_kv_ptrs: list[int]
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Run ``get_mha_kv_ptrs_with_pp`` with the known number of layers, without guessing drafts."""
    total = getattr(self.kv_args, "total_kv_layers", 0)
    if not total:
        return original(self, src_kv_ptrs, dst_kv_ptrs)
    return get_mha_kv_ptrs_with_pp(
        src_kv_ptrs,
        dst_kv_ptrs,
        prefill_start_layer=self.kv_args.prefill_start_layer,
        total_kv_layers=total,
    )


def strict_mla_kv_ptrs(
    original: Callable[..., Any],
    self: Any,
    src_kv_ptrs: list[int],
    dst_kv_ptrs: list[int],
    state_type: Any = None,
) -> tuple[list[int], list[int], int]:
    """Run ``get_mla_kv_ptrs_with_pp`` without crossing from one group of buffers into the next.

    In lists with one entry for each layer, drafts pair only with as many drafts.
    """
    kv_args = self.kv_args
    groups = getattr(kv_args, "kv_buf_groups", 1)
    hidden = getattr(kv_args, "hidden_kv_layers", 0)
    drafts = getattr(kv_args, "num_draft_entries", 0)
    if state_type is not None or getattr(kv_args, "mla_compression_ratios", None):
        return original(self, src_kv_ptrs, dst_kv_ptrs, state_type)
    if groups == 1 and drafts and len(src_kv_ptrs) != len(dst_kv_ptrs):
        return get_mla_kv_ptrs_with_pp(
            src_kv_ptrs, dst_kv_ptrs, prefill_start_layer=kv_args.prefill_start_layer,
            total_kv_layers=getattr(kv_args, "total_kv_layers", 0), num_draft_entries=drafts,
        )  # fmt: skip
    if groups == 1 or not hidden:
        return original(self, src_kv_ptrs, dst_kv_ptrs, state_type)
    parallel = _from_sglang("runtime_context", "get_parallel")()
    return get_mla_kv_ptrs_with_pp(
        src_kv_ptrs, dst_kv_ptrs, prefill_start_layer=kv_args.prefill_start_layer,
        kv_buf_groups=groups, hidden_kv_layers=hidden,
        draft_kv_layers=getattr(kv_args, "draft_kv_layers", 0),
        is_last_rank=parallel.pp_group.is_last_rank,
    )  # fmt: skip
