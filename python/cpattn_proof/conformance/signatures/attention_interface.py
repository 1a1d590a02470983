# SPDX-License-Identifier: Apache-2.0
"""Attention functions of transformers: ``fn(module, query, key, value, attention_mask, scaling)``.

Their masks are added to scores and hide keys by the smallest finite number, which makes a row
without keys the mean of all keys: such rows are not tried.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..cases import Features
from ..forms import returned
from ..tensors import Tensors
from .signature import Answer, Signature


def _call(fn: Any, tensors: Tensors) -> Answer:
    import torch

    case = tensors.case
    q, k, v = (x.transpose(1, 2) for x in tensors.padded())
    hidden = torch.finfo(q.dtype).min
    mask = q.new_zeros(tensors.visible().shape).masked_fill(~tensors.visible(), hidden)
    module = SimpleNamespace(
        num_key_value_groups=case.num_heads // case.num_kv_heads, training=False,
        is_causal=case.causal, layer_idx=0, sinks=tensors.sinks,
    )  # fmt: skip
    options: dict[str, Any] = {"softcap": case.softcap} if case.softcap else {}
    if tensors.sinks is not None:
        options["s_aux"] = tensors.sinks
    result = fn(module, q, k, v, mask[:, None], scaling=case.scale, dropout=0.0, **options)
    out, _ = returned(result, out=4, weights=None)
    return Answer(tensors.rows_of(out))


SIGNATURE = Signature(
    "transformers",
    Features(layouts=("padded",), empty=False, window=True, poison=False),
    _call,
)
