# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.functional.scaled_dot_product_attention`.

Its causal mask is aligned to the top left, so it is used only for as many queries as keys; all
other masks are tensors.
"""

from __future__ import annotations

from typing import Any

from ..cases import Features
from ..forms import returned
from ..tensors import Tensors
from .signature import Answer, Signature


def _call(fn: Any, tensors: Tensors) -> Answer:
    case = tensors.case
    q, k, v = (x.transpose(1, 2) for x in tensors.padded())
    whole = len({*case.q_lens, *case.kv_lens}) == 1 and k.shape[2] == case.kv_lens[0]
    options: dict[str, Any] = {"enable_gqa": True} if case.num_heads != case.num_kv_heads else {}
    if case.causal and whole and case.window is None:
        options["is_causal"] = True
    elif case.causal or len(set(case.kv_lens)) > 1 or k.shape[2] > case.kv_lens[0]:
        options["attn_mask"] = tensors.visible()[:, None]
    (out,) = returned(fn(q, k, v, scale=case.scale, **options), out=4)
    return Answer(tensors.rows_of(out.transpose(1, 2)))


SIGNATURE = Signature(
    "sdpa",
    Features(
        layouts=("padded",),
        short_kv=True,
        window=True,
        window_without_causal=False,
        v_head_dim=True,
        poison=False,
    ),
    _call,
)
