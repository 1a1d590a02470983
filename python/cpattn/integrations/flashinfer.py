# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged prefill and decode wrappers and its merging of states, on CPU tensors.

Arguments and their order are FlashInfer's; so is the log-sum-exp: to base 2, float32,
[tokens, heads], -inf for a row that sees no key. Caches are used in place, whether K and V are two
tensors or one. Arguments about graphics processors (workspaces, graphs, backends, dtypes to compile
for) are accepted and have no meaning here; what would change the result and is not supported is
refused with a ValueError that names it.

`install` puts these names where ``import flashinfer`` finds them.
"""

from __future__ import annotations

import math
from functools import partialmethod
from typing import Any

import numpy as np

from .. import attention
from .._containers import Tensor, empty
from .._stand_in import StandIn
from .._visibility import Lengths, band_mask, visibility

LOG2E = math.log2(math.e)
LN2 = math.log(2)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys.

    Parameters
    ----------
    v_a, v_b : tensors, shape [tokens, heads, head_dim]
    s_a, s_b : float32 tensors, shape [tokens, heads]
        Log-sum-exp to base 2; -inf marks a row without keys.

    Returns
    -------
    v, s
        New tensors.
    """
    v, s = attention.merge_state(v_a.clone(), s_a.float() * LN2, v_b, s_b.float() * LN2)
    return v, s.mul_(LOG2E)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None
) -> None:
    """Merge ``v_other, s_other`` into ``v, s``, for the tokens of ``mask`` [tokens] if given."""
    rows = slice(None) if mask is None else mask.bool()
    v[rows], s[rows] = merge_state(v[rows], s[rows], v_other[rows], s_other[rows])


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over several disjoint sets of keys, in float32 and rounded once.

    Parameters
    ----------
    v : tensor, shape [tokens, num_states, heads, head_dim]
    s : float32 tensor, shape [tokens, num_states, heads]
        Log-sum-exp to base 2.

    Returns
    -------
    v : tensor, shape [tokens, heads, head_dim]
    s : float32 tensor, shape [tokens, heads]
    """
    if v.ndim != 4 or v.shape[1] == 0:
        raise ValueError(
            "merge_states: v must be [tokens, num_states, heads, head_dim] with a state at least, "
            f"got shape {list(v.shape)}"
        )
    first, *others = v.unbind(1)
    lse, *other_lses = (s.float() * LN2).unbind(1)
    out, lse = first.float().clone(), lse.contiguous()
    for other, other_lse in zip(others, other_lses, strict=True):
        attention.merge_state(out, lse, other.float(), other_lse)
    return out.to(v.dtype), lse * LOG2E


def _refuse(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{function}: {name} is not supported, got {value!r}")


def _page_tables(
    function: str,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    seq_lens: Tensor | None,
) -> tuple[Lengths, Any]:
    """The length of each sequence and its pages, from the CSR form.

    ``seq_lens`` says the lengths once more.
    """
    ends, pages, last = (np.asarray(x, np.int64) for x in (indptr, indices, last_page_len))
    counts = np.diff(ends)
    if len(ends) == 0 or ends[0] != 0 or np.any(counts < 0) or ends[-1] > len(pages):
        raise ValueError(
            f"{function}: paged_kv_indptr must start at 0, not decrease and end within the "
            f"{len(pages)} paged_kv_indices, got {ends}"
        )
    filled = counts > 0
    if last.shape != counts.shape or np.any((last[filled] < 1) | (last[filled] > page_size)):
        raise ValueError(
            f"{function}: paged_kv_last_page_len must be {len(counts)} numbers in [1, {page_size}]"
            f", got {last}"
        )
    table = np.full((len(counts), counts.max(initial=0)), -1)
    table[np.arange(table.shape[1]) < counts[:, None]] = pages[: ends[-1]]
    lengths = np.where(filled, (counts - 1) * page_size + last, 0)
    if seq_lens is not None and not np.array_equal(np.asarray(seq_lens).ravel(), lengths):
        raise ValueError(
            f"{function}: seq_lens must be what the pages say, {lengths}, got {seq_lens}"
        )
    return lengths, table


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class _PagedWrapper:
    """What prefill and decode have in common: a plan, and running it on the tensors of a layer."""

    _name = ""

    def __init__(self, kv_layout: str, jit_args: Any) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"{self._name}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
        _refuse(self._name, jit_args=jit_args)
        self._kv_layout = kv_layout
        self._plan: Any = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """There is no workspace."""

    def end_forward(self) -> None:
        """Nothing; FlashInfer keeps the name, too."""

    def _make_plan(
        self,
        q_lens: Lengths,
        kv_lens: Lengths,
        table: Any,
        *,
        page_size: int,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        o_data_type: Any,
        **options: Any,
    ) -> None:
        self._plan = attention.plan_attention(
            q_lens=q_lens,
            kv_lens=kv_lens,
            block_tables=table,
            page_size=page_size,
            num_pages=int(table.max(initial=-1)) + 1,  # of the cache only so many are known of
            **options,
        )
        if sm_scale is None:
            sm_scale = attention.default_scale(f"{self._name}.plan", self._plan.head_dim)
        self._sm_scale = sm_scale
        self._window_left = window_left
        self._softcap = logits_soft_cap or 0.0
        self._out_dtype = o_data_type

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attention over one layer's cache.

        Parameters
        ----------
        q : tensor, shape [tokens, num_qo_heads, head_dim_qk]
        paged_kv_cache : pair of tensors, or one
            K and V of [pages, page_size, num_kv_heads, dim] ("NHD") or
            [pages, num_kv_heads, page_size, dim] ("HND"), or both in [pages, 2, ...].
        q_scale, k_scale, v_scale : float, optional
            Factors of the scores and of the result.
        window_left : int, optional
            As planned, if given.
        sinks : float32 tensor, shape [num_qo_heads], optional
            A logit per head that takes weight but has no value.

        Returns
        -------
        out : tensor, shape [tokens, num_qo_heads, head_dim_vo]
        lse : float32 tensor, shape [tokens, num_qo_heads], with ``return_lse``
            To base 2, sinks not included.
        """
        function = f"{self._name}.run"
        if self._plan is None:
            raise ValueError(f"{function}: plan must be called first")
        if args:
            raise ValueError(f"{function}: arguments of custom kernels are not supported")
        if window_left not in (None, self._window_left):
            raise ValueError(
                f"{function}: window_left must be as planned ({self._window_left}), "
                f"got {window_left}"
            )
        if self._out_dtype is not None and _name(self._out_dtype) != _name(q.dtype):
            raise ValueError(
                f"{function}: o_data_type must be that of q ({q.dtype}), got {self._out_dtype}"
            )
        if isinstance(paged_kv_cache, (tuple, list)):
            k_cache, v_cache = paged_kv_cache
        elif paged_kv_cache.ndim == 5 and paged_kv_cache.shape[1] == 2:
            k_cache, v_cache = paged_kv_cache.unbind(1)
        else:
            raise ValueError(
                f"{function}: paged_kv_cache must be a pair of tensors or one of [pages, 2, ...], "
                f"got shape {list(paged_kv_cache.shape)}"
            )
        scale = self._sm_scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else float(factor)
        if return_lse and lse is None:
            lse = empty(q, q.shape[:2], "float32")
        result: Tensor = attention.run_attention(
            self._plan, q, k_cache, v_cache, kv_layout=self._kv_layout, scale=scale,
            softcap=self._softcap, sinks=sinks, out=out, lse=lse,
        )  # fmt: skip
        if v_scale is not None:
            result *= float(v_scale)
        if lse is not None:
            lse.mul_(LOG2E)
        return (result, lse) if return_lse else result

    run_return_lse = partialmethod(run, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Attention of new tokens over a paged cache: planned once, run for every layer.

    Parameters
    ----------
    float_workspace_buffer
        Not used; may be None. The same holds for the other arguments after ``kv_layout``, but
        for ``jit_args``, which must be None.
    kv_layout : "NHD" or "HND"
    """

    _name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        super().__init__(kv_layout, jit_args)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
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
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
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
            The pages of each sequence; its last new tokens are the queries.
        custom_mask : bool tensor, sum(q_len * kv_len) elements, optional
            True = visible; ``causal`` then has no meaning.
        window_left : int
            Keys before a token's own that it sees; -1 is no bound. Without ``causal`` it takes a
            mask of one byte per query and key.
        sm_scale : float, default 1/sqrt(head_dim_qk)
        fixed_split_size, disable_split_kv
            Either makes a row's result bitwise independent of the batch.
        packed_custom_mask, pos_encoding_mode, prefix_len_ptr and the rest of multi-item scoring
            Must be left at their defaults.
        others
            Have no meaning here. Lengths and block tables repeat what the indices say;
            ``seq_lens`` is compared with them, and ``o_data_type`` with q.
        """
        function = f"{self._name}.plan"
        _refuse(
            function,
            packed_custom_mask=packed_custom_mask is not None,
            pos_encoding_mode=pos_encoding_mode if pos_encoding_mode != "NONE" else None,
            prefix_len_ptr=prefix_len_ptr is not None,
            token_pos_in_items_ptr=token_pos_in_items_ptr is not None,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr is not None,
        )
        kv_lens, table = _page_tables(
            function, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens
        )
        ends: Lengths = np.asarray(qo_indptr, np.int64)
        q_lens = ends[1:] - ends[:-1]
        if len(q_lens) != len(kv_lens):
            raise ValueError(
                f"{function}: qo_indptr must have {len(kv_lens) + 1} elements as paged_kv_indptr, "
                f"got {len(q_lens) + 1}"
            )
        if custom_mask is None:
            visible = visibility(q_lens, kv_lens, window_left, 0 if causal else -1)
        else:
            mask = np.asarray(custom_mask).ravel()
            if window_left >= 0:
                mask = mask & band_mask(q_lens, kv_lens, window_left, -1)
            visible = {"causal": False, "custom_mask": mask}
        self._make_plan(
            q_lens, kv_lens, table, page_size=page_size, sm_scale=sm_scale,
            window_left=window_left, logits_soft_cap=logits_soft_cap, o_data_type=o_data_type,
            num_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim_qk,
            v_head_dim=head_dim_vo,
            batch_invariant=disable_split_kv or fixed_split_size is not None, **visible,
        )  # fmt: skip

    begin_forward = plan


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """Attention of one new token per sequence; see `BatchPrefillWithPagedKVCacheWrapper`."""

    _name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Tensor | None = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        super().__init__(kv_layout, jit_args)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
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
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a batch; the token of a sequence is the last one in its pages.

        What the arguments mean is said in `BatchPrefillWithPagedKVCacheWrapper.plan`.
        """
        function = f"{self._name}.plan"
        _refuse(
            function, pos_encoding_mode=pos_encoding_mode if pos_encoding_mode != "NONE" else None
        )
        kv_lens, table = _page_tables(function, indptr, indices, last_page_len, page_size, seq_lens)
        q_lens = np.ones_like(kv_lens)
        self._make_plan(
            q_lens, kv_lens, table, page_size=page_size, sm_scale=sm_scale,
            window_left=window_left, logits_soft_cap=logits_soft_cap, o_data_type=o_data_type,
            num_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            batch_invariant=disable_split_kv or fixed_split_size is not None,
            **visibility(q_lens, kv_lens, window_left, 0),
        )  # fmt: skip

    begin_forward = plan


def install() -> StandIn:
    """Put these names where ``flashinfer`` and its prefill, decode and cascade are imported.

    Returns
    -------
    StandIn
        A context manager; its ``remove()`` or the end of a ``with`` takes the modules away.

    Raises
    ------
    ImportError
        If a package of that name can be imported.
    """
    names = {
        name.__name__: name
        for name in (
            merge_state,
            merge_state_in_place,
            merge_states,
            BatchPrefillWithPagedKVCacheWrapper,
            BatchDecodeWithPagedKVCacheWrapper,
        )
    }
    return StandIn("flashinfer", ["prefill", "decode", "cascade"], names)
