# SPDX-License-Identifier: Apache-2.0
"""Attention of vLLM on CPU as an operator for `conform`, over a cache that vLLM's own operator
writes: the kernels choose the order of keys in a page."""

import warnings

import torch

with warnings.catch_warnings():  # modules that vLLM imports warn
    warnings.simplefilter("ignore")
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()

from cpattn_proof.conformance import Answer, Features, Signature
from cpattn_proof.conformance.tensors import reserved


def attention(q, k, v, *, slots, shape, starts, kv_lens, block_table, causal, window, softcap,
              scale, sinks):  # fmt: skip
    """Write keys and values [n, num_kv_heads, head_dim] to slots of a cache, then attend.

    `shape` is the cache's, [pages, num_kv_heads, page_size, 2 * head_dim]; `window` is vLLM's,
    including a token's own key, or -1.
    """
    pages, num_kv_heads, page_size, width = shape
    isa = _get_attn_isa(q.dtype, page_size, width // 2, "auto")
    cache = reserved(shape, q.dtype).view(pages, num_kv_heads, 2 * page_size, width // 2)
    k_cache, v_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(kv_lens), num_heads=q.shape[1], num_kv_heads=num_kv_heads,
        head_dim=width // 2, seq_lens=kv_lens, dtype=q.dtype, query_start_loc=starts,
        causal=causal, sliding_window_size=window, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.full_like(q, torch.nan)
    ops.cpu_attention_with_kv_cache(
        q, k_cache, v_cache, out, starts, kv_lens, scale, causal, None, window, block_table,
        softcap, schedule, sinks,
    )  # fmt: skip
    return out


def _call(fn, tensors):
    case = tensors.case
    k, v = tensors.ragged()  # slots of all pages, in order
    first = tensors.first_page
    pages = first + len(k) // case.page_size
    out = fn(
        tensors.q[: sum(case.q_lens)], k, v,
        slots=torch.arange(len(k)) + first * case.page_size,
        shape=(pages, case.num_kv_heads, case.page_size, 2 * case.head_dim),
        starts=tensors.ends(tensors.q_lens), kv_lens=tensors.indices(tensors.kv_lens),
        block_table=tensors.block_tables, causal=case.causal,
        window=-1 if case.window is None else case.window + 1, softcap=case.softcap,
        scale=case.scale, sinks=tensors.sinks,
    )  # fmt: skip
    return Answer(out)


#: Engines have no sequences without keys or with fewer keys than queries.
SIGNATURE = Signature(
    "vllm_cpu",
    Features(
        page_sizes=(32, 64, 128), head_dims=(32, 80, 64, 128), empty=False, window=True,
        softcap=True, sinks=True, far=True,
    ),
    _call,
)  # fmt: skip
