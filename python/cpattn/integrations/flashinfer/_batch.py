# SPDX-License-Identifier: Apache-2.0
"""Wrappers of prefill and decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._types import AnyTensor
from .._visibility import Lengths, check_bits, visibility
from ._paged import PagedWrapper, page_tables, refuse


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of new tokens over a paged cache, planned once and run for every layer.

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph, backend, jit_kwargs
        Not used; may be None.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        Not used.
    custom_mask_buf, mask_indptr_buf
        Not used.
    kv_layout : "NHD" or "HND"
        Whether tokens ("NHD") or heads ("HND") come first in a page.
    jit_args
        Must be None.

    Examples
    --------
    >>> import torch
    >>> wrapper = BatchPrefillWithPagedKVCacheWrapper()
    >>> ends = torch.tensor([0, 3])
    >>> wrapper.plan(ends, ends[:1].new_tensor([0, 1]), ends[:1], ends[1:], 4, 1, 16, 8)
    >>> wrapper.run(torch.ones(3, 4, 16), torch.ones(2, 2, 8, 1, 16)).shape
    torch.Size([3, 4, 16])
    """

    _name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: AnyTensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: AnyTensor | None = None,
        paged_kv_indptr_buf: AnyTensor | None = None,
        paged_kv_indices_buf: AnyTensor | None = None,
        paged_kv_last_page_len_buf: AnyTensor | None = None,
        custom_mask_buf: AnyTensor | None = None,
        mask_indptr_buf: AnyTensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(kv_layout, jit_args)

    def plan(
        self,
        qo_indptr: AnyTensor,
        paged_kv_indptr: AnyTensor,
        paged_kv_indices: AnyTensor,
        paged_kv_last_page_len: AnyTensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: AnyTensor | None = None,
        packed_custom_mask: AnyTensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: AnyTensor | None = None,
        token_pos_in_items_ptr: AnyTensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: AnyTensor | None = None,
        seq_lens: AnyTensor | None = None,
        seq_lens_q: AnyTensor | None = None,
        block_tables: AnyTensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch.

        Parameters
        ----------
        qo_indptr : int tensor, shape [batch + 1]
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : int tensors
            Pages of each sequence; the queries are its last tokens.
        custom_mask : bool tensor, sum(q_len * kv_len) elements, optional
            True = visible; it overrides ``causal``.
        packed_custom_mask : uint8 tensor, sum(ceil(q_len * kv_len / 8)) elements, optional
            The mask in bits, as in `paged_attention`; it overrides ``custom_mask``.
        window_left : int
            Number of visible keys before a token's own; -1 for no bound.
        sm_scale : float, default 1/sqrt(head_dim_qk)
        kv_data_type : dtype or str, optional
            Type of codes in uint8 caches: float8_e4m3fn, float8_e5m2 or int8. Caches of these
            dtypes must have this dtype.
        fixed_split_size, disable_split_kv
            Either makes a row's result bitwise independent of the batch.
        pos_encoding_mode : {"NONE", "ALIBI"}
            ALIBI adds slope * (j - i) to the score of new token i and key j, with FlashInfer's
            slopes for the number of heads; not with ``logits_soft_cap``.
        prefix_len_ptr and the rest of multi-item scoring
            Must have their defaults.

        Notes
        -----
        Other arguments have no effect. Lengths and block tables repeat the indices; the call
        compares ``seq_lens`` with them, and ``o_data_type`` with q.
        """
        function = f"{self._name}.plan"
        refuse(
            function,
            prefix_len_ptr=prefix_len_ptr is not None,
            token_pos_in_items_ptr=token_pos_in_items_ptr is not None,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr is not None,
        )
        kv_lens, table = page_tables(
            function, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens
        )
        ends: Lengths = np.asarray(qo_indptr, np.int64)
        q_lens = np.diff(ends)
        if q_lens.shape != kv_lens.shape or ends[0] != 0 or np.any(q_lens < 0):
            raise ValueError(
                f"{function}: qo_indptr must have {len(kv_lens) + 1} elements as paged_kv_indptr, "
                f"start at 0 and not decrease, got {ends}"
            )
        has_mask = custom_mask is not None or packed_custom_mask is not None
        visible = visibility(window_left, 0 if causal and not has_mask else -1)
        if packed_custom_mask is not None:
            check_bits(function, packed_custom_mask, q_lens, kv_lens)
            visible["packed_custom_mask"] = packed_custom_mask
        elif custom_mask is not None:
            visible["custom_mask"] = np.asarray(custom_mask).ravel()
        self._make_plan(
            q_lens, kv_lens, table, page_size=page_size, sm_scale=sm_scale,
            window_left=window_left, logits_soft_cap=logits_soft_cap, o_data_type=o_data_type,
            kv_data_type=kv_data_type,
            num_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim_qk,
            v_head_dim=head_dim_vo, pos_encoding_mode=pos_encoding_mode,
            sees_ahead=has_mask or not causal,
            batch_invariant=disable_split_kv or fixed_split_size is not None, **visible,
        )  # fmt: skip

    begin_forward = plan


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of one new token per sequence.

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph, use_tensor_cores, backend
        Not used; may be None.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        Not used.
    kv_layout : "NHD" or "HND"
        Whether tokens ("NHD") or heads ("HND") come first in a page.
    jit_args
        Must be None.

    Examples
    --------
    >>> import torch
    >>> wrapper = BatchDecodeWithPagedKVCacheWrapper()
    >>> wrapper.plan(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([3]), 4, 1, 16, 8)
    >>> wrapper.run(torch.ones(1, 4, 16), torch.ones(2, 2, 8, 1, 16)).shape
    torch.Size([1, 4, 16])
    """

    _name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: AnyTensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: AnyTensor | None = None,
        paged_kv_indices_buffer: AnyTensor | None = None,
        paged_kv_last_page_len_buffer: AnyTensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(kv_layout, jit_args)

    def plan(
        self,
        indptr: AnyTensor,
        indices: AnyTensor,
        last_page_len: AnyTensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: AnyTensor | None = None,
        seq_lens: AnyTensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch; the token of a sequence is the last one in its pages.

        See `BatchPrefillWithPagedKVCacheWrapper.plan` for the arguments.
        """
        function = f"{self._name}.plan"
        kv_lens, table = page_tables(function, indptr, indices, last_page_len, page_size, seq_lens)
        q_lens = np.ones_like(kv_lens)
        self._make_plan(
            q_lens, kv_lens, table, page_size=page_size, sm_scale=sm_scale,
            window_left=window_left, logits_soft_cap=logits_soft_cap, o_data_type=o_data_type,
            kv_data_type=data_type if kv_data_type is None else kv_data_type,
            num_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            pos_encoding_mode=pos_encoding_mode, sees_ahead=False,
            batch_invariant=disable_split_kv or fixed_split_size is not None,
            **visibility(window_left, 0),
        )  # fmt: skip

    begin_forward = plan
