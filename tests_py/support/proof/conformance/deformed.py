# SPDX-License-Identifier: Apache-2.0
"""Operators that return something else than their signature says, for some of their batches."""

from __future__ import annotations

from torch.nn.functional import scaled_dot_product_attention

from cpattn.integrations.flash_attn import flash_attn_varlen_func
from cpattn.integrations.flashinfer import BatchPrefillWithPagedKVCacheWrapper
from cpattn.sparse import dcp_local_indices, fast_topk

from .broken import attention


def without_mask(change):
    """Returns what `change` makes of the right results where there is no causal mask."""

    def operator(q, k, v, *, causal, **options):
        answer = attention(q, k, v, causal=causal, **options)
        return answer if causal else change(*answer)

    return operator


def lse_of_varlen_is_none(*arguments, **options):
    out, *rest = flash_attn_varlen_func(*arguments, **options)
    return (out, *rest) if options["causal"] else (out, None, None)


class RunsWithoutLse(BatchPrefillWithPagedKVCacheWrapper):
    def plan(self, *arguments, **options):
        self.causal = options["causal"]
        super().plan(*arguments, **options)

    def run(self, *arguments, **options):
        out, lse = super().run(*arguments, **options)
        return (out, lse) if self.causal else out


def numpy_of_groups(q, k, v, *, enable_gqa=False, **options):
    out = scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **options)
    return out.numpy() if enable_gqa else out


def one_sequence_of_many(q, k, v, **options):
    out = scaled_dot_product_attention(q, k, v, **options)
    return out if len(out) == 3 else out[:1]


def flat_where_there_are_groups(module, query, key, value, mask, *, scaling, **options):
    groups = module.num_key_value_groups
    out = scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, enable_gqa=groups > 1
    ).transpose(1, 2)
    return out if groups > 1 else (out, None)


def a_row_too_many(scores, lengths, topk, row_starts=None):
    chosen = fast_topk(scores, lengths, topk, row_starts)
    return chosen if row_starts is None else chosen[[*range(len(chosen)), 0]]


def ranks_of_floats(indices, *, dcp_size, **options):
    local = dcp_local_indices(indices, dcp_size=dcp_size, **options)
    return local.double() if dcp_size > 2 else local


def ranks_of_which_one_is_silent(indices, *, dcp_rank, **options):
    return None if dcp_rank == 2 else dcp_local_indices(indices, dcp_rank=dcp_rank, **options)
