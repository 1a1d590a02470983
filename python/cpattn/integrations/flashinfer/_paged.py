# SPDX-License-Identifier: Apache-2.0
"""Base of the paged wrappers."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import numpy as np

from ... import attention
from ..._containers import empty, need_scales
from ..._types import AnyTensor
from .._visibility import Lengths
from ._alibi import alibi
from ._merge import LOG2E


def refuse(function: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise ValueError(f"{function}: {name} is not supported, got {value!r}")


def page_tables(
    function: str,
    indptr: AnyTensor,
    indices: AnyTensor,
    last_page_len: AnyTensor,
    page_size: int,
    seq_lens: AnyTensor | None,
) -> tuple[Lengths, Any]:
    """Return the length of each sequence and its pages, from the CSR form.

    ``seq_lens`` repeats the lengths.
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


def _code_name(dtype: Any) -> str | None:
    """Return the name of a dtype of codes, or None for dtypes that caches state themselves."""
    name = None if dtype is None else _name(dtype)
    return name if name in ("float8_e4m3fn", "float8_e5m2", "int8") else None


class PagedWrapper:
    """Base of the wrappers of prefill and decode: a plan, and its run on a layer's tensors."""

    _name = ""

    def __init__(self, kv_layout: str, jit_args: Any) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"{self._name}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
        refuse(self._name, jit_args=jit_args)
        self._kv_layout = kv_layout
        self._plan: Any = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: AnyTensor, int_workspace_buffer: AnyTensor
    ) -> None:
        """Do nothing: there is no workspace."""

    def end_forward(self) -> None:
        """Do nothing; the name is FlashInfer's."""

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
        kv_data_type: Any,
        pos_encoding_mode: str,
        sees_ahead: bool,
        **options: Any,
    ) -> None:
        function, has_alibi = f"{self._name}.plan", pos_encoding_mode == "ALIBI"
        if not has_alibi and pos_encoding_mode != "NONE":
            refuse(function, pos_encoding_mode=pos_encoding_mode)
        if has_alibi and logits_soft_cap:
            raise ValueError(
                f"{function}: logits_soft_cap must be 0 with ALIBI, got {logits_soft_cap}"
            )
        plan = attention.plan_attention(
            q_lens=q_lens,
            kv_lens=kv_lens,
            block_tables=table,
            page_size=page_size,
            num_pages=int(table.max(initial=-1)) + 1,  # only these pages of the cache are known
            **options,
        )
        if sm_scale is None:
            sm_scale = attention.default_scale(function, plan.head_dim)
        self._plan, self._sm_scale = plan, sm_scale
        self._window_left = window_left
        self._softcap = logits_soft_cap or 0.0
        self._out_dtype = o_data_type
        self._kv_dtype = _code_name(kv_data_type)
        self._biases: dict[str, Any] = {}
        self._missing_lse: AnyTensor | None = None
        if has_alibi:
            self._biases, self._missing_lse = alibi(
                plan.num_heads, q_lens, kv_lens, sees_ahead=sees_ahead
            )

    def run(
        self,
        q: AnyTensor,
        paged_kv_cache: AnyTensor | tuple[AnyTensor, AnyTensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: AnyTensor | float | None = None,
        v_scale: AnyTensor | float | None = None,
        out: AnyTensor | None = None,
        lse: AnyTensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: AnyTensor | None = None,
    ) -> Any:
        """Attention over one layer's cache.

        Parameters
        ----------
        q : tensor, shape [tokens, num_qo_heads, head_dim_qk]
        paged_kv_cache : pair of tensors, or one
            K and V of [pages, page_size, num_kv_heads, dim] ("NHD") or
            [pages, num_kv_heads, page_size, dim] ("HND"), or both in [pages, 2, ...].
            Codes (float8_e4m3fn, float8_e5m2, int8), too; in uint8 if planned with their dtype.
        q_scale : float, optional
            Factor of the scores.
        k_scale, v_scale : float or tensor, optional
            Factors of keys and values: positive numbers or tensors [num_kv_heads].
        window_left : int, optional
            Must equal the planned window, if given.
        sinks : float32 tensor, shape [num_qo_heads], optional
            One logit per head that takes weight but has no value.

        Returns
        -------
        out : tensor, shape [tokens, num_qo_heads, head_dim_vo]
        lse : float32 tensor, shape [tokens, num_qo_heads], with ``return_lse``
            Log-sum-exp to base 2, without sinks.
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
        need_scales(function, k_cache, self._kv_dtype, k_scale=k_scale, v_scale=v_scale)
        scale = self._sm_scale * (1.0 if q_scale is None else float(q_scale))
        if return_lse and lse is None:
            lse = empty(function, q, q.shape[:2], "float32")
        result: AnyTensor = attention.run_attention(
            self._plan, q, k_cache, v_cache, kv_layout=self._kv_layout, k_scale=k_scale,
            v_scale=v_scale, kv_dtype=self._kv_dtype, scale=scale, softcap=self._softcap,
            sinks=sinks, out=out, lse=lse, **self._biases,
        )  # fmt: skip
        if lse is not None:
            lse.mul_(LOG2E)
            if self._missing_lse is not None:
                lse.add_(self._missing_lse)
        return (result, lse) if return_lse else result

    run_return_lse = partialmethod(run, return_lse=True)
