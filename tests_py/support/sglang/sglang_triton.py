# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of sglang for attention in prefill and decode, as `conform` calls them."""

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

from cpattn_proof.conformance import Answer, Features, Signature

SPLITS = 8  # parts of the keys of a sequence, as by default in the backend


def _slots(tensors, lengths):
    """Return the begins of sequences among the slots, and the slots of their first tokens."""
    size, tables = tensors.case.page_size, tensors.block_tables.long()
    within = torch.arange(size, device=tables.device)
    slots = (tables[:, :, None] * size + within).flatten(1)
    chosen = [row[:length] for row, length in zip(slots, lengths, strict=True)]
    return tensors.ends(lengths), torch.cat(chosen)


def extend(q, k, v, caches, starts, prefix_starts, prefix_slots, *, longest, case, sinks):
    rows = len(k)
    out = q.new_full((rows, case.num_heads, case.v_head_dim), torch.nan)
    lse = q.new_full((rows, case.num_heads), torch.nan, dtype=torch.float32)
    extend_attention_fwd(
        q[:rows], k, v, out, *(cache.flatten(0, 1) for cache in caches), starts, prefix_starts,
        prefix_slots, None, case.causal, None, longest, 1.0, 1.0, sm_scale=case.scale,
        logit_cap=case.softcap, sinks=sinks, lse_extend=lse,
        sliding_window_size=-1 if case.window is None else case.window,
    )  # fmt: skip
    return out, lse


def _extend(fn, tensors):
    case = tensors.case
    prefixes = [kv_len - q_len for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)]
    return Answer(
        *fn(
            tensors.q, *tensors.new(), tensors.caches(), tensors.ends(tensors.q_lens),
            *_slots(tensors, prefixes), longest=max(case.q_lens), case=case, sinks=tensors.sinks,
        )
    )  # fmt: skip


def decode(q, caches, starts, slots, *, case, sinks):
    """Attend with one token per sequence, in `SPLITS` parts of its keys."""
    shape = (len(q), case.num_heads, SPLITS)
    out = q.new_full((len(q), case.num_heads, case.v_head_dim), torch.nan)
    parts = q.new_full((*shape, case.v_head_dim), torch.nan, dtype=torch.float32)
    lses = q.new_full(shape, torch.nan, dtype=torch.float32)
    splits = torch.full((len(q),), SPLITS, dtype=torch.int32, device=q.device)
    decode_attention_fwd(
        q, *(cache.flatten(0, 1) for cache in caches), out, starts, slots, parts, lses, splits,
        SPLITS, case.scale, 1.0, 1.0, logit_cap=case.softcap, sinks=sinks,
    )  # fmt: skip
    return out


def _decode(fn, tensors):
    """Decode each new token as a separate sequence, which ends with it."""
    case, device = tensors.case, tensors.q.device
    starts, slots = _slots(tensors, tensors.kv_lens)
    begins, ends = starts.tolist()[:-1], []
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        ends.append(range(kv_len - q_len + 1, kv_len + 1))
    chosen = [
        slots[b : b + end] for b, lengths in zip(begins, ends, strict=True) for end in lengths
    ]
    lengths = torch.tensor([len(own) for own in chosen], dtype=torch.int32, device=device)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return Answer(
        fn(
            tensors.q[: len(chosen)], tensors.caches(), starts, torch.cat(chosen), case=case,
            sinks=tensors.sinks,
        )
    )  # fmt: skip


#: Engines have no sequences without keys or with fewer keys than queries.
EXTEND = Signature(
    "sglang_extend",
    Features(empty=False, window=True, softcap=True, sinks=True, v_head_dim=True, lse=True,
             far=True),
    _extend,
)  # fmt: skip
DECODE = Signature(
    "sglang_decode",
    Features(causal=(True,), empty=False, softcap=True, sinks=True, v_head_dim=True, far=True),
    _decode,
)
