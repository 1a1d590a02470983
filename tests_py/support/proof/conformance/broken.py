# SPDX-License-Identifier: Apache-2.0
"""Operators with the signature of `cpattn.paged_attention`, each wrong in one way: they are that
operator with other arguments or results, and share no code with the oracles that name them."""

import math
import os
import signal
import time
from functools import partial

import numpy as np
import torch

import cpattn

LN2 = math.log(2)
attention = cpattn.paged_attention


def attend_where(sees, q, k, v, *, q_lens, kv_lens, **options):
    """Attend; query i of a sequence sees key j if ``sees(i, j, q_len, kv_len)``."""
    parts = [
        [sees(i, j, q_len, kv_len) for i in range(q_len) for j in range(kv_len)]
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
    ]
    mask = torch.tensor([flag for part in parts for flag in part], dtype=torch.bool)
    options.pop("allow_short_kv", None)
    return attention(
        q, k, v, q_lens=q_lens, kv_lens=kv_lens, causal=False, custom_mask=mask, **options
    )


def sides(window):
    """Return how many keys before and after its own a query sees; None for all."""
    return window if isinstance(window, tuple) else (window, None)


def usual_mask(causal, window, *, top_left=False, shift=0, chunk=None, block=1):
    """Return a mask; keys up to `shift` behind a query's own are seen, from its row if `top_left`.

    Rows of a `chunk` begin behind the prefix again; windows begin with a `block` of keys.
    """

    left, right = sides(window)

    def sees(i, j, q_len, kv_len):
        row = i if chunk is None else i % chunk
        position = row if top_left else row + kv_len - q_len
        first = 0 if left is None else (position - left) // block * block
        before = right is None or j <= position + right
        return (not causal or j <= position + shift) and before and j >= first

    return sees


def in_parts(q, k, v, *, causal, window=None, **options):
    usual = usual_mask(causal, window)

    def part(second):
        def sees(i, j, q_len, kv_len):
            return (j >= kv_len // 2) == second and usual(i, j, q_len, kv_len)

        return attend_where(sees, q, k, v, **options)

    return part(False), part(True)


def tokens_of(memory, pages, kv_len, kv_layout="NHD"):
    """Return keys or values of one sequence, [kv_len, heads, dim]."""
    pages = memory[pages.long()]
    if kv_layout == "HND":
        pages = pages.transpose(1, 2)
    return pages.flatten(0, 1)[:kv_len]


def plain_weights(
    s, q, k, v, *, kv_lens, block_tables, scale, causal, kv_layout="NHD", window=None, softcap=0.0,
    alibi_slopes=None, sinks=None, **_,
):  # fmt: skip
    """Return float32 weights of a sequence's keys, [rows, heads, keys], and its values by head."""
    kv_len, group = kv_lens[s], q.shape[1] // k.shape[2 if kv_layout == "NHD" else 1]
    own_k, own_v = (tokens_of(x, block_tables[s], kv_len, kv_layout) for x in (k, v))
    own_k, own_v = (x.float().repeat_interleave(group, 1) for x in (own_k, own_v))
    scores = torch.einsum("qhd,khd->qhk", q.float(), own_k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.as_tensor(np.arange(len(q)) + kv_len - len(q))[:, None]
    key = torch.arange(kv_len)[None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None] * (key - position).abs()[:, None]
    hidden = (key > position) & causal
    left, right = sides(window)
    if left is not None:
        hidden |= key < position - left
    if right is not None:
        hidden |= key > position + right
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(len(q), -1)[..., None]], -1)
    return torch.softmax(scores, -1).nan_to_num()[..., :kv_len], own_v


def returning(change):
    """Return an operator that applies `change` to the right output and log-sum-exp."""
    return lambda *tensors, **options: change(*attention(*tensors, **options))


def operator_of(fault):
    """Return the operator with a fault, by name; padding rows are for `flash_attn_varlen_func`."""
    others = {"pad-rows-read": pad_rows_read, "new-keys-unwritten": new_keys_unwritten}
    return others.get(fault, partial(_wrong, fault))


def new_keys_unwritten(q, k_cache, v_cache, *args, **options):
    """Attend by `flash_attn_with_kvcache`, which writes new keys into copies."""
    from cpattn.integrations.flash_attn import flash_attn_with_kvcache

    if options.get("k") is not None:
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
    return flash_attn_with_kvcache(q, k_cache, v_cache, *args, **options)


def pad_rows_read(q, k, v, cu_seqlens_q, *args, **options):
    from cpattn.integrations.flash_attn import flash_attn_varlen_func

    ends = cu_seqlens_q.clone()
    ends[-1] = len(q)
    return flash_attn_varlen_func(q, k, v, ends, *args, **options)


def sdpa_without_is_causal(q, k, v, *, is_causal=False, **options):
    """Attend by torch's operator, with masks only if they are tensors."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def multiplies_hidden_values(q, k, v, *, kv_layout="NHD", **options):
    """Attend; the second half of a sequence's rows multiplies values after its end by 0, too."""
    far = k.numel() > 2**31  # such a cache has no NaN, and there is no room for a copy
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


def hide_by_a_number(k, v, out, lse, *, q_lens, kv_lens, block_tables, **options):
    """Change results as if hidden scores were -1e30: a row without keys has equal weights."""
    row = 0
    for pages, q_len, kv_len in zip(block_tables, q_lens, kv_lens, strict=True):
        empty = lse[row : row + q_len] == -torch.inf
        if kv_len and empty.any():
            own = tokens_of(v, pages, kv_len, options.get("kv_layout", "NHD"))
            mean = own.float().mean(0).repeat_interleave(out.shape[1] // own.shape[1], 0)
            out[row : row + q_len][empty] = mean.expand(q_len, -1, -1)[empty].to(out.dtype)
            lse[row : row + q_len][empty] = -1e30
        row += q_len


def infinite(out, lse):
    out[0], out[-1, 0, :3] = torch.inf, -torch.inf
    return out, lse


def _wrong(fault, q, k, v, **options):
    window, softcap, sinks = (options.get(name) for name in ("window", "softcap", "sinks"))
    if fault == "crash" and window == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang" and softcap:
        time.sleep(600)
    if fault == "raises" and sinks is not None:
        raise IndexError("list index out of range")
    if fault == "16-bit-accumulation":
        return accumulates_in_16_bits(q, k, v, **options)
    per_part = fault.startswith("merge") or (fault == "sink-per-part" and sinks is not None)
    if fault in _MASKS or per_part or (fault == "window-whole-blocks" and window is not None):
        return _of_parts(fault, q, k, v, **options)
    called, changes = _other_arguments(fault, q, k, v, **options)
    out, lse = attention(*called, **options | changes)
    if fault == "changes-inputs":
        q.mul_(options["scale"])
    return _other_results(fault, q, k, v, out, lse, **options)


_MASKS = {
    "mask-top-left": {"top_left": True},
    "mask-off-by-one": {"shift": -1},
    "mask-ignored": {"shift": math.inf},
    "mask-per-chunk": {"chunk": 64},
}


def _of_parts(fault, q, k, v, **options):
    if fault in _MASKS or fault == "window-whole-blocks":
        page_size = k.shape[1 if options.get("kv_layout", "NHD") == "NHD" else 2]
        change = _MASKS.get(fault, {"block": page_size})
        mask = usual_mask(options.pop("causal"), options.pop("window", None), **change)
        return attend_where(mask, q, k, v, **options)
    (out_a, lse_a), (out_b, lse_b) = in_parts(q, k, v, **options)
    if fault == "merge-nan":
        ratio = torch.exp(lse_a - lse_b)
        share = (ratio / (1 + ratio))[..., None]
        return (share * out_a + (1 - share) * out_b).to(q.dtype), torch.logaddexp(lse_a, lse_b)
    if fault == "merge-swapped":
        return cpattn.merge_state(out_a, lse_b, out_b, lse_a)
    base = LN2 if fault == "merge-wrong-base" else 1
    out, lse = cpattn.merge_state(out_a, lse_a / base, out_b, lse_b / base)
    return out, lse * base


def _other_arguments(fault, q, k, v, *, q_lens, kv_lens, block_tables, scale, **options):
    nhd = options.get("kv_layout", "NHD") == "NHD"
    page_size, changes = k.shape[1 if nhd else 2], {}
    match fault:
        case "window-ignored" | "sink-ignored":
            changes = {"window" if fault == "window-ignored" else "sinks": None}
        case "softcap-ignored":
            changes = {"softcap": 0.0}
        case "window-off-by-one" if options.get("window") is not None:
            left, right = sides(options["window"])
            longer = None if left is None else left + 1
            changes = {"window": longer if right is None else (longer, right)}
        case "alibi-ignored":
            changes = {"alibi_slopes": None}
        case "alibi-before-scale" | "alibi-top-left" if "alibi_slopes" in options:
            slopes = options["alibi_slopes"]
            changes = {"alibi_slopes": slopes * scale}
            if fault == "alibi-top-left":
                pairs = zip(q_lens, kv_lens, strict=True)
                far = [(torch.arange(kv) - torch.arange(q)[:, None]).abs() for q, kv in pairs]
                biases = [-slopes[:, None, None] * distance for distance in far]
                changes = {"alibi_slopes": None, "bias": biases}
        case "softcap-before-scale":
            changes = {"softcap": options.get("softcap", 0.0) * scale}
        case "scale-ignored" | "scale-twice":
            changes = {"scale": None if fault == "scale-ignored" else scale * scale}
        case "gqa-head-order":
            order = _head_order(q, k, nhd)
            q = q[:, order].contiguous()
            changes = {"sinks": options["sinks"][order]} if "sinks" in options else {}
        case "kv-len-without-new":
            before = [max(kv_len - q_len, 0) for q_len, kv_len in zip(q_lens, kv_lens, strict=True)]
            changes = {"kv_lens": before, "allow_short_kv": True}
        case "kv-len-without-prefix":
            changes = {"kv_lens": list(map(min, q_lens, kv_lens))}
        case "reads-beyond-length":
            changes = {"kv_lens": [-(-kv_len // page_size) * page_size for kv_len in kv_lens]}
        case "page-size":
            k, v = (x if nhd else x.transpose(1, 2).contiguous() for x in (k, v))
            k, v, last = k.flatten(0, 1), v.flatten(0, 1), block_tables[:, -1:]
            changes = {"page_size": max(page_size // 2, 1), "kv_layout": "NHD"}
            changes["block_tables"] = torch.cat([block_tables, last.expand_as(block_tables)], 1)
        case "page-order":
            tables = changes["block_tables"] = block_tables.clone()
            for row, kv_len in zip(tables, kv_lens, strict=True):
                used = -(-kv_len // page_size)
                row[:used] = row[:used].sort().values
        case "batch-order":
            order = np.argsort([-kv_len for kv_len in kv_lens], kind="stable")
            changes = {"block_tables": block_tables[order]}
        case "overflow-32-bit":
            stride = k[0].numel()
            wrapped = (block_tables.long() * stride + 2**31) % 2**32 - 2**31
            changes = {"block_tables": ((wrapped // stride) % len(k)).int()}
        case "page-id-16-bit":
            changes = {"block_tables": block_tables & 0xFFFF}
        case "v-head-dim" if q.shape[-1] != v.shape[-1]:
            flat, dim, width = v.flatten(), q.shape[-1], v.shape[-1]
            rows = (torch.arange(len(flat) // width) * dim)[:, None] + torch.arange(width)
            v = flat[rows.clamp(max=len(flat) - 1)].view(v.shape)
        case "layout-nhd-hnd":
            k, v = (x.view(len(x), x.shape[2], x.shape[1], x.shape[3]) for x in (k, v))
            changes = {"kv_layout": "HND" if nhd else "NHD"}
    return (q, k, v), changes


def _head_order(q, k, nhd):
    heads, kv_heads = q.shape[1], k.shape[2 if nhd else 1]
    return [h for group in range(kv_heads) for h in range(group, heads, kv_heads)]


def _other_results(fault, q, k, v, out, lse, **options):
    match fault:
        case "lse-base-2":
            lse = lse / LN2
        case "lse-unscaled":
            plain = {"scale": 1.0, "softcap": 0.0, "alibi_slopes": None}
            lse = attention(q, k, v, **options | plain)[1]
        case "lse-with-sink" if "sinks" in options:
            lse = torch.logaddexp(lse, options["sinks"])
        case "lse-finite-on-empty":
            lse = lse.clamp(min=-5e4)
        case "mean-on-empty" if "sinks" not in options:
            hide_by_a_number(k, v, out, lse, **options)
        case "nan-on-empty":
            total = lse.exp()[..., None]
            out = (out * total / total).to(out.dtype)
        case "gqa-head-order":
            back = np.argsort(_head_order(q, k, options.get("kv_layout", "NHD") == "NHD"))
            out, lse = out[:, back], lse[:, back]
        case "unknown":
            out[:, -1] *= 1.5
        case "wrong-form" if not options.get("causal", True):
            out = out.double()
    return out, lse
