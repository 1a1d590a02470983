# SPDX-License-Identifier: Apache-2.0
"""Operators that return something else than their signature says, for some of their batches."""

from __future__ import annotations

import torch

import cpattn
from cpattn.integrations.flash_attn import flash_attn_varlen_func
from cpattn.integrations.flashinfer import BatchPrefillWithPagedKVCacheWrapper
from cpattn.sparse import dcp_local_indices, fast_topk


def no_lse_of_windows(q, k, v, *, window=None, **options):
    out, lse = cpattn.paged_attention(q, k, v, window=window, **options)
    return (out, lse) if window is None else out


def no_lse(q, k, v, **options):
    return cpattn.paged_attention(q, k, v, **options)[0], None


def no_lse_of_many(q, k, v, **options):
    out, lse = cpattn.paged_attention(q, k, v, **options)
    return out, lse if options["causal"] else None


def on_another_device(q, k, v, **options):
    out, lse = cpattn.paged_attention(q, k, v, **options)
    return out if options["causal"] else out.to("meta"), lse


def lse_in_16_bits(q, k, v, **options):
    out, lse = cpattn.paged_attention(q, k, v, **options)
    return out, lse.to(q.dtype)


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
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, enable_gqa=enable_gqa, **options
    )
    return out.numpy() if enable_gqa else out


def one_sequence_of_many(q, k, v, **options):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    return out if len(out) == 3 else out[:1]


def flat_where_there_are_groups(module, query, key, value, mask, *, scaling, **options):
    groups = module.num_key_value_groups
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2) if groups > 1 else (out.transpose(1, 2), None)


def a_row_too_many(scores, lengths, topk, row_starts=None):
    chosen = fast_topk(scores, lengths, topk, row_starts)
    return chosen if row_starts is None else torch.cat([chosen, chosen[:1]])


def ranks_of_floats(indices, *, dcp_rank, dcp_size, interleave_size):
    local = dcp_local_indices(
        indices, dcp_rank=dcp_rank, dcp_size=dcp_size, interleave_size=interleave_size
    )
    return local.double() if dcp_size > 2 else local


def ranks_of_which_one_is_silent(indices, *, dcp_rank, dcp_size, interleave_size):
    local = dcp_local_indices(
        indices, dcp_rank=dcp_rank, dcp_size=dcp_size, interleave_size=interleave_size
    )
    return None if dcp_rank == 2 else local
