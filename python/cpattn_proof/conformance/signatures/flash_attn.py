# SPDX-License-Identifier: Apache-2.0
"""flash-attn: `flash_attn_varlen_func` and `flash_attn_with_kvcache`.

Arguments with default values are left out. The log-sum-exp of a row without keys may be either
infinity, as releases differ. It is not checked with ALiBi: if the only mask is causal, flash-attn
counts distances from the first key, which outputs do not show.
"""

from __future__ import annotations

from typing import Any

from ..cases import Features
from ..forms import returned
from ..tensors import Tensors
from .signature import Answer, Signature


def _options(tensors: Tensors) -> dict[str, Any]:
    case = tensors.case
    options: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal}
    sides = case.window, 0 if case.causal else case.window_right
    if case.window is not None or case.window_right is not None:
        options["window_size"] = tuple(-1 if side is None else side for side in sides)
    if tensors.slopes is not None:
        options["alibi_slopes"] = tensors.slopes
    if case.softcap:
        options["softcap"] = case.softcap
    return options


def _natural(lse: Any) -> Any:
    """Return [batch, heads, rows] or [heads, rows], with -inf if +inf marks a row without keys."""
    if lse is None:
        return None
    return lse.masked_fill(lse == float("inf"), float("-inf")).transpose(-1, -2)


def _call_varlen(fn: Any, tensors: Tensors) -> Answer:
    case = tensors.case
    options = _options(tensors)
    if case.layout == "paged":
        k, v = tensors.caches()
        options["block_table"] = tensors.block_tables
    else:
        k, v = tensors.ragged()
    result = fn(
        tensors.q, k, v, tensors.ends(tensors.q_lens), tensors.ends(tensors.kv_lens),
        max(case.q_lens), max(case.kv_lens), return_attn_probs=True, **options,
    )  # fmt: skip
    out, lse = returned(result, out=3, lse=2)
    return Answer(out, _natural(lse))


def _call_kvcache(fn: Any, tensors: Tensors) -> Answer:
    case = tensors.case
    batch, q_len = len(case.q_lens), case.q_lens[0]
    k, v = tensors.caches(without_new=case.append)
    options = _options(tensors)
    lengths = list(case.kv_lens)
    if case.append:
        options["k"], options["v"] = (x.unflatten(0, (batch, q_len)) for x in tensors.new())
        lengths = [kv_len - q_len for kv_len in lengths]
    result = fn(
        tensors.q[: tensors.case.q_lens[0] * batch].unflatten(0, (batch, q_len)), k, v,
        cache_seqlens=tensors.indices(lengths), block_table=tensors.block_tables,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    out, lse = returned(result, out=4, lse=3)
    lse = _natural(lse)
    return Answer(out.flatten(0, 1), None if lse is None else lse.flatten(0, 1))


VARLEN = Signature(
    "flash_attn_varlen",
    Features(
        layouts=("ragged", "paged"),
        short_kv=True,
        window=True,
        window_without_causal=True,
        window_right=True,
        alibi=True,
        alibi_lse=False,
        softcap=True,
        lse=True,
        pad_rows=True,
        far=True,
    ),
    _call_varlen,
)

KVCACHE = Signature(
    "flash_attn_with_kvcache",
    Features(
        same_q_lens=True,
        short_kv=True,
        window=True,
        window_without_causal=True,
        window_right=True,
        alibi=True,
        alibi_lse=False,
        softcap=True,
        lse=True,
        append=True,
        far=True,
    ),
    _call_kvcache,
)
