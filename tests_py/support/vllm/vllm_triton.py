# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of vLLM for attention, whole and split over the keys, as `conform` calls it."""

import torch
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from cpattn_proof.conformance import Answer, Features, Signature

SEGMENTS = 16  # parts of the keys of a sequence, as in the backend


def attention(q, k_cache, v_cache, starts, kv_lens, block_table, *, longest, case, sinks):
    out = torch.full_like(q, torch.nan)
    shape = (len(q), case.num_heads, SEGMENTS)
    buffers = [
        q.new_full(size, torch.nan, dtype=torch.float32)
        for size in ((*shape, 1 << (case.head_dim - 1).bit_length()), shape, shape)
    ]
    unified_attention(
        q, k_cache, v_cache, out, starts, longest, kv_lens, int(kv_lens.max()), case.scale,
        case.causal, (-1 if case.window is None else case.window, 0), block_table, case.softcap,
        None, None, None, len(q), SEGMENTS, *buffers, sinks=sinks,
    )  # fmt: skip
    return out


def _whole(fn, tensors):
    return Answer(
        fn(
            tensors.q[: sum(tensors.case.q_lens)], *tensors.caches(), tensors.ends(tensors.q_lens),
            tensors.indices(tensors.kv_lens), tensors.block_tables,
            longest=max(2, *tensors.q_lens), case=tensors.case, sinks=tensors.sinks,
        )
    )  # fmt: skip


def _split(fn, tensors):
    """Attend to split keys with each new token as a separate sequence, which ends with it."""
    case = tensors.case
    lens = [
        kv_len - q_len + row + 1
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
        for row in range(q_len)
    ]
    counts = tensors.indices(case.q_lens)
    return Answer(
        fn(
            tensors.q[: len(lens)], *tensors.caches(), tensors.indices(range(len(lens) + 1)),
            tensors.indices(lens), tensors.block_tables.repeat_interleave(counts, dim=0),
            longest=1, case=case, sinks=tensors.sinks,
        )
    )  # fmt: skip


#: Engines have no sequences without keys or with fewer keys than queries.
_FEATURES = {
    "page_sizes": (16, 64, 128), "head_dims": (32, 80, 64, 128), "empty": False, "window": True,
    "softcap": True, "sinks": True, "far": True,
}  # fmt: skip
UNIFIED = Signature("vllm_unified", Features(**_FEATURES), _whole)
SPLIT = Signature("vllm_unified_split", Features(causal=(True,), **_FEATURES), _split)
