# SPDX-License-Identifier: Apache-2.0
"""FlashInfer: a wrapper like `BatchPrefillWithPagedKVCacheWrapper`, or one call with all arguments.

A class is made with a workspace and a layout, planned and run. A function gets the queries, the
pair of caches, and the arguments of ``plan`` and ``run`` by name. The log-sum-exp is to base 2.
"""

from __future__ import annotations

import math
from typing import Any

from ..cases import Features
from ..forms import returned
from ..tensors import Tensors
from .signature import Answer, Signature

_WORKSPACE_BYTES = 1 << 20
_WORKSPACE_BYTES_OF_GPU = 128 << 20


def _call(fn: Any, tensors: Tensors) -> Answer:
    import torch

    case = tensors.case
    counts, tables = tensors.page_counts, tensors.block_tables.tolist()
    pages = [page for row, count in zip(tables, counts, strict=True) for page in row[:count]]
    size = case.page_size
    last = [(kv_len - 1) % size + 1 if kv_len else 0 for kv_len in case.kv_lens]
    plan: dict[str, Any] = {
        "qo_indptr": tensors.ends(tensors.q_lens),
        "paged_kv_indptr": tensors.ends(counts),
        "paged_kv_indices": tensors.indices(pages),
        "paged_kv_last_page_len": tensors.indices(last),
        "num_qo_heads": case.num_heads, "num_kv_heads": case.num_kv_heads,
        "head_dim_qk": case.head_dim, "page_size": size, "causal": case.causal,
        "sm_scale": case.scale, "q_data_type": tensors.q.dtype, "kv_data_type": tensors.q.dtype,
    }  # fmt: skip
    if case.window is not None:
        plan["window_left"] = case.window
    if case.softcap:
        plan["logits_soft_cap"] = case.softcap
    if case.v_head_dim != case.head_dim:
        plan["head_dim_vo"] = case.v_head_dim
    run: dict[str, Any] = {"return_lse": True}
    if tensors.sinks is not None:
        run["sinks"] = tensors.sinks
    if isinstance(fn, type):
        room = _WORKSPACE_BYTES if tensors.device == "cpu" else _WORKSPACE_BYTES_OF_GPU
        workspace = torch.zeros(room, dtype=torch.uint8, device=tensors.device)
        wrapper = fn(workspace, case.kv_layout)
        wrapper.plan(**plan)
        result = wrapper.run(tensors.q, tensors.caches(), **run)
    else:
        result = fn(tensors.q, tensors.caches(), **plan, **run, kv_layout=case.kv_layout)
    out, lse = returned(result, out=3, lse=2)
    return Answer(out, None if lse is None else lse * math.log(2))


SIGNATURE = Signature(
    "flashinfer",
    Features(
        kv_layouts=("NHD", "HND"),
        page_sizes=(1, 4, 16, 64),
        window=True,
        softcap=True,
        sinks=True,
        v_head_dim=True,
        lse=True,
        far=True,
    ),
    _call,
)
