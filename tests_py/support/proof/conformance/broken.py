# SPDX-License-Identifier: Apache-2.0
"""Operators with the signature of `cpattn.paged_attention`, each wrong in one way.

They are that operator, given other arguments or with its results changed, and so share no code with
the wrong oracles that are to name them. `operator_of` has them by their faults.
"""

from __future__ import annotations

import math
import os
import signal
import time

import numpy as np
import torch

import cpattn

LN2 = math.log(2)
attention = cpattn.paged_attention


def attend_where(sees, q, k, v, *, q_lens, kv_lens, **options):
    """Query i of a sequence sees key j where ``sees(i, j, q_len, kv_len)``."""
    parts = [
        [sees(i, j, q_len, kv_len) for i in range(q_len) for j in range(kv_len)]
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]
    mask = torch.tensor([flag for part in parts for flag in part], dtype=torch.bool)
    options.pop("allow_short_kv", None)
    return attention(
        q, k, v, q_lens=q_lens, kv_lens=kv_lens, causal=False, custom_mask=mask, **options
    )


def usual_mask(causal, window, *, top_left=False, shift=0):
    """What a query sees; keys up to `shift` behind its own, from its row on if `top_left`."""

    def sees(i, j, q_len, kv_len):
        position = i if top_left and causal else i + kv_len - q_len
        return (not causal or j <= position + shift) and (window is None or j >= position - window)

    return sees


def in_parts(q, k, v, *, causal, window=None, **options):
    """Over the first half of each sequence's keys, and over the second."""
    usual = usual_mask(causal, window)

    def part(second):
        def sees(i, j, q_len, kv_len):
            return (j >= kv_len // 2) == second and usual(i, j, q_len, kv_len)

        return attend_where(sees, q, k, v, **options)

    return part(False), part(True)


def tokens_of(memory, pages, kv_len, kv_layout="NHD"):
    """Keys or values of one sequence, [kv_len, heads, dim]."""
    pages = memory[pages.long()]
    if kv_layout == "HND":
        pages = pages.transpose(1, 2)
    return pages.flatten(0, 1)[:kv_len]


def plain_weights(
    s, q, k, v, *, kv_lens, block_tables, scale, causal, kv_layout="NHD", window=None, softcap=0.0,
    sinks=None, **_,
):  # fmt: skip
    """The weights of a sequence's keys in float32, [rows, heads, keys], and its values by head."""
    kv_len, group = kv_lens[s], q.shape[1] // k.shape[2 if kv_layout == "NHD" else 1]
    own_k, own_v = (tokens_of(x, block_tables[s], kv_len, kv_layout) for x in (k, v))
    own_k, own_v = (x.float().repeat_interleave(group, 1) for x in (own_k, own_v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), own_k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.as_tensor(np.arange(len(q)) + kv_len - len(q))[:, None]
    key = torch.arange(kv_len)[None]
    hidden = (key > position) & causal
    if window is not None:
        hidden |= key < position - window
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(len(q), -1)[..., None]], -1)
    return torch.softmax(scores, -1).nan_to_num()[..., :kv_len], own_v


def calling(change):
    """An operator that calls the right one with the options that `change` makes of its own."""

    def operator(q, k, v, **options):
        page_size = k.shape[1 if options.get("kv_layout", "NHD") == "NHD" else 2]
        return attention(q, k, v, **options | change(k=k, page_size=page_size, **options))

    return operator


def ignoring(name, usual=None):
    """An operator that takes an option and does not look at it."""
    return calling(lambda **options: {name: usual} if name in options else {})


def acting(name, act):
    """An operator that does something where it is given an option."""

    def operator(q, k, v, **options):
        if options.get(name) is not None:
            act(options[name])
        return attention(q, k, v, **options)

    return operator


def returning(change):
    """An operator that returns what `change` makes of the right output and log-sum-exp."""
    return lambda *tensors, **options: change(*attention(*tensors, **options))


def masking(**otherwise):
    """An operator whose mask is not the usual one."""

    def operator(q, k, v, *, causal, window=None, **options):
        return attend_where(usual_mask(causal, window, **otherwise), q, k, v, **options)

    return operator


def sdpa_without_is_causal(q, k, v, *, is_causal=False, **options):
    """With the signature of torch's operator; masks that are tensors it has."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def lse_unscaled(q, k, v, *, scale, softcap=0.0, **options):
    out, _ = attention(q, k, v, scale=scale, softcap=softcap, **options)
    return out, attention(q, k, v, scale=1.0, **options)[1]


def lse_with_sink(q, k, v, **options):
    out, lse = attention(q, k, v, **options)
    return out, torch.logaddexp(lse, options["sinks"]) if "sinks" in options else lse


def nan_on_empty(out, lse):
    total = lse.exp()[..., None]
    return (out * total / total).to(out.dtype), lse


def sink_per_part(q, k, v, *, sinks=None, **options):
    if sinks is None:
        return attention(q, k, v, **options)
    parts = in_parts(q, k, v, sinks=sinks, **options)
    return cpattn.merge_state(*(x for part in parts for x in part))


def gqa_head_order(q, k, v, *, sinks=None, kv_layout="NHD", **options):
    heads, kv_heads = q.shape[1], k.shape[2 if kv_layout == "NHD" else 1]
    order = [h for group in range(kv_heads) for h in range(group, heads, kv_heads)]
    back = np.argsort(order)
    if sinks is not None:
        options["sinks"] = sinks[order]
    out, lse = attention(q[:, order].contiguous(), k, v, kv_layout=kv_layout, **options)
    return out[:, back], lse[:, back]


def kv_len_without_new(*, q_lens, kv_lens, **_):
    before = [max(kv_len - q_len, 0) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
    return {"kv_lens": before, "allow_short_kv": True}


def reads_beyond_length(*, kv_lens, page_size, **_):
    return {"kv_lens": [-(-kv_len // page_size) * page_size for kv_len in kv_lens]}


def multiplies_hidden_values(q, k, v, *, kv_layout="NHD", **options):
    """Rows of the second half of a sequence's queries take all values of its last page times 0."""
    far = k.numel() > 2**31  # of which nothing is NaN, and a copy has no room
    clean = (k, v) if far else tuple(x.nan_to_num() for x in (k, v))
    out, lse = attention(q, *clean, kv_layout=kv_layout, **options)
    page_size, row = k.shape[1 if kv_layout == "NHD" else 2], 0
    for pages, q_len, kv_len in zip(
        options["block_tables"], options["q_lens"], options["kv_lens"], strict=True
    ):
        if kv_len % page_size and v[pages[kv_len // page_size]].isnan().any():
            out[row + q_len // 2 : row + q_len] = torch.nan
        row += q_len
    return out, lse


def page_size(q, k, v, *, block_tables, kv_layout="NHD", **options):
    if kv_layout == "HND":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    last = block_tables[:, -1:].expand(-1, block_tables.shape[1])
    return attention(
        q, k.flatten(0, 1), v.flatten(0, 1), page_size=max(k.shape[1] // 2, 1),
        block_tables=torch.cat([block_tables, last], 1), **options,
    )  # fmt: skip


def page_order(*, kv_lens, block_tables, page_size, **_):
    tables = block_tables.clone()
    for row, kv_len in zip(tables, kv_lens, strict=True):
        used = -(-kv_len // page_size)
        row[:used] = row[:used].sort().values
    return {"block_tables": tables}


def pad_rows_read(q, k, v, cu_seqlens_q, *args, **options):
    """With the signature of `flash_attn_varlen_func`."""
    from cpattn.integrations.flash_attn import flash_attn_varlen_func

    ends = cu_seqlens_q.clone()
    ends[-1] = len(q)
    return flash_attn_varlen_func(q, k, v, ends, *args, **options)


def overflow_32_bit(*, k, block_tables, **_):
    stride = k[0].numel()
    wrapped = (block_tables.long() * stride + 2**31) % 2**32 - 2**31
    return {"block_tables": ((wrapped // stride) % len(k)).int()}


def batch_order(*, kv_lens, block_tables, **_):
    order = np.argsort([-kv_len for kv_len in kv_lens], kind="stable")
    return {"block_tables": block_tables[order]}


def merge_wrong_base(q, k, v, **options):
    (out_a, lse_a), (out_b, lse_b) = in_parts(q, k, v, **options)
    out, lse = cpattn.merge_state(out_a, lse_a / LN2, out_b, lse_b / LN2)
    return out, lse * LN2


def merge_nan(q, k, v, **options):
    (out_a, lse_a), (out_b, lse_b) = in_parts(q, k, v, **options)
    ratio = torch.exp(lse_a - lse_b)
    share = (ratio / (1 + ratio))[..., None]
    return (share * out_a + (1 - share) * out_b).to(q.dtype), torch.logaddexp(lse_a, lse_b)


def accumulates_in_16_bits(q, k, v, **options):
    out, lse = attention(q, k, v, **options)
    if q.dtype == torch.float32 or k.numel() > 2**31:
        return out, lse
    row = 0
    for s, q_len in enumerate(options["q_lens"]):
        weights, values = plain_weights(s, q[row : row + q_len], k, v, **options)
        total = torch.zeros_like(out[row : row + q_len])
        for j in range(values.shape[0]):
            total += (weights[..., j, None] * values[j]).to(q.dtype)
        out[row : row + q_len] = total
        row += q_len
    return out, lse


def v_head_dim(q, k, v, **options):
    dim, width = q.shape[-1], v.shape[-1]
    if dim != width:
        flat = v.flatten()
        rows = (torch.arange(len(flat) // width) * dim)[:, None] + torch.arange(width)
        v = flat[rows.clamp(max=len(flat) - 1)].view(v.shape)
    return attention(q, k, v, **options)


def layout_nhd_hnd(q, k, v, *, kv_layout="NHD", **options):
    k, v = (x.view(len(x), x.shape[2], x.shape[1], x.shape[3]) for x in (k, v))
    return attention(q, k, v, kv_layout="HND" if kv_layout == "NHD" else "NHD", **options)


def unknown(out, lse):
    out[:, -1] *= 1.5
    return out, lse


def infinite(out, lse):
    out[0], out[-1, 0, :3] = torch.inf, -torch.inf
    return out, lse


def wrong_form(q, k, v, *, causal=True, **options):
    out, lse = attention(q, k, v, causal=causal, **options)
    return (out if causal else out.float().double()), lse


_BY_NAME = {
    "mask-top-left": masking(top_left=True),
    "mask-off-by-one": masking(shift=-1),
    "mask-ignored": masking(shift=math.inf),
    "window-off-by-one": calling(
        lambda window=None, **_: {} if window is None else {"window": window + 1}
    ),
    "window-ignored": ignoring("window"),
    "lse-base-2": returning(lambda out, lse: (out, lse / LN2)),
    "lse-finite-on-empty": returning(lambda out, lse: (out, lse.clamp(min=-5e4))),
    "nan-on-empty": returning(nan_on_empty),
    "sink-ignored": ignoring("sinks"),
    "softcap-ignored": ignoring("softcap", 0.0),
    "softcap-before-scale": calling(lambda scale, softcap=0.0, **_: {"softcap": softcap * scale}),
    "scale-ignored": ignoring("scale"),
    "scale-twice": calling(lambda scale, **_: {"scale": scale * scale}),
    "kv-len-without-new": calling(kv_len_without_new),
    "kv-len-without-prefix": calling(
        lambda q_lens, kv_lens, **_: {"kv_lens": list(map(min, q_lens, kv_lens))}
    ),
    "reads-beyond-length": calling(reads_beyond_length),
    "page-order": calling(page_order),
    "batch-order": calling(batch_order),
    "overflow-32-bit": calling(overflow_32_bit),
    "16-bit-accumulation": accumulates_in_16_bits,
    "unknown": returning(unknown),
    "crash": acting("window", lambda window: window == 3 and os.kill(os.getpid(), signal.SIGSEGV)),
    "hang": acting("softcap", lambda softcap: softcap and time.sleep(600)),
    "raises": acting("sinks", lambda sinks: {}["no such sinks"]),
}


def operator_of(fault):
    """The operator with a fault, by its name; most functions here are called like theirs."""
    return _BY_NAME.get(fault) or globals()[fault.replace("-", "_")]
