# SPDX-License-Identifier: Apache-2.0
"""`make lint` fails where mypy refuses a right call of a user, or takes a wrong one.

The comment at a wrong call names its kind of error; one that excuses nothing is an error itself.
"""

import numpy as np
import torch
from numpy.typing import NDArray

import cpattn

q, cache = torch.ones(3, 2, 16), torch.ones(4, 8, 1, 16)
mask = np.ones(30, np.bool_)
array = np.ones((3, 2, 16), np.float32)
plan = cpattn.plan_attention(
    q_lens=[3],
    kv_lens=np.array([10]),
    block_tables=[[2, 0]],
    page_size=8,
    num_pages=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
)
metadata = cpattn.build_cp_metadata([3], (10,), cp_rank=0, cp_size=1)


def lse_if(asked: bool) -> None:
    cpattn.run_attention(plan, q, cache, cache, return_lse=asked)


out: torch.Tensor = cpattn.run_attention(plan, q, cache, cache)
out, lse = cpattn.run_attention(plan, q, cache, cache, return_lse=True)
own: NDArray[np.float32] = cpattn.run_attention(plan, array, cache, cache)
out = cpattn.paged_attention(q, cache, cache, q_lens=range(3), kv_lens=[10], custom_mask=mask)
out, lse = cpattn.merge_state(out, lse, out, lse)
out, lse = cpattn.merge_states([out, out], (lse, lse), sinks=None, lse=lse)
out, lse = cpattn.merge_states(out, lse)
out = cpattn.do_cp_attn_fia(
    q,
    cache,
    cache,
    metadata,
    block_tables=torch.ones(1, 2),
    page_size=8,
    num_heads=2,
    num_kv_heads=1,
)
out = metadata.unshard([metadata.shard(q)])
size: int = (
    cpattn.kv.MHATokenToKVPool(size=64, page_size=8, num_layers=1, num_kv_heads=1, head_dim=16)
    .get_key_buffer(0)
    .shape[0]
)

cpattn.run_attention(plan, [[[1.0]]], cache, cache)  # type: ignore[call-overload]
cpattn.run_attention(plan, q, cache, cache, scale="1")  # type: ignore[call-overload]
cpattn.run_attention(metadata, q, cache, cache)  # type: ignore[call-overload]
cpattn.paged_attention(q, cache, cache, q_lens=[3.0])  # type: ignore[list-item]
cpattn.paged_attention(q, cache, cache, q_lens="3")  # type: ignore[arg-type]
cpattn.can_apply_cp([3], 2)  # type: ignore[call-arg]
out = cpattn.run_attention(plan, q, cache, cache, return_lse=True)  # type: ignore[assignment]
out = cpattn.run_attention(plan, array, cache, cache)  # type: ignore[assignment]
