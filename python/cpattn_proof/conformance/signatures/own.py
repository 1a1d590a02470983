# SPDX-License-Identifier: Apache-2.0
"""`cpattn.paged_attention`."""

from __future__ import annotations

from typing import Any

from ..cases import Features
from ..forms import returned
from ..tensors import Tensors
from .signature import Answer, Signature


def _call(fn: Any, tensors: Tensors) -> Answer:
    case = tensors.case
    k, v = tensors.caches()
    window = case.window if case.window_right is None else (case.window, case.window_right)
    options: dict[str, Any] = {
        name: value
        for name, value, usual in (
            ("kv_layout", case.kv_layout, "NHD"),
            ("window", window, None),
            ("alibi_slopes", tensors.slopes, None),
            ("softcap", case.softcap, 0.0),
            ("sinks", tensors.sinks, None),
            ("allow_short_kv", _is_short(case.q_lens, case.kv_lens), False),
        )
        if value is not usual and value != usual
    }
    result = fn(
        tensors.q, k, v, q_lens=tensors.q_lens, kv_lens=tensors.kv_lens,
        block_tables=tensors.block_tables, scale=case.scale, causal=case.causal, return_lse=True,
        **options,
    )  # fmt: skip
    return Answer(*returned(result, out=3, lse=2))


def _is_short(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> bool:
    return any(q_len > kv_len for q_len, kv_len in zip(q_lens, kv_lens, strict=True))


SIGNATURE = Signature(
    "cpattn",
    Features(
        kv_layouts=("NHD", "HND"),
        short_kv=True,
        window=True,
        window_right=True,
        alibi=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        lse=True,
        far=True,
    ),
    _call,
)
