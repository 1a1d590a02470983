# SPDX-License-Identifier: Apache-2.0
"""torch_npu's `npu_fused_infer_attention_score`, over blocks with TND queries.

With ``sparse_mode=3`` the causal mask is aligned to the bottom right; a call passes its template.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..cases import Features
from ..forms import returned
from ..tensors import Tensors
from .signature import Answer, Signature

_TEMPLATE = 2048


def _call(fn: Any, tensors: Tensors) -> Answer:
    case = tensors.case
    k, v = (x.flatten(2) for x in tensors.caches())
    options: dict[str, Any] = {}
    if case.causal:
        template = np.triu(np.ones((_TEMPLATE, _TEMPLATE), bool), 1)
        options = {"sparse_mode": 3, "atten_mask": tensors.tensor(template, "bool")}
    result = fn(
        tensors.q, k, v, input_layout="TND", num_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads, scale=case.scale,
        actual_seq_lengths=np.cumsum(case.q_lens).tolist(),
        actual_seq_lengths_kv=tensors.kv_lens, block_table=tensors.block_tables,
        block_size=case.page_size, softmax_lse_flag=True, **options,
    )  # fmt: skip
    out, lse = returned(result, out=3, lse=3)
    return Answer(out, None if lse is None else lse[..., 0])


SIGNATURE = Signature(
    "npu_fused_infer_attention_score",
    Features(short_kv=True, v_head_dim=True, lse=True, far=True, page_sizes=(16, 64, 128)),
    _call,
)
