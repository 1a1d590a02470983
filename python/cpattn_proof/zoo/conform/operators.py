# SPDX-License-Identifier: Apache-2.0
"""Bugs of engines in attention over parts and pages.

Each operator is made from `cpattn.paged_attention` as in the engine. Edge cases are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ...conformance.runner import conform
from ...findings import Report
from ..entry import Shipped, ZooEntry

_Part = tuple[Any, Any]


def _attend(*args: Any, **options: Any) -> _Part:
    from cpattn.attention import paged_attention

    out, lse = paged_attention(*args, **options)
    return out, lse


def _prefix_and_new(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[_Part, _Part]:
    """Attend to the first half of each sequence's keys, and to the second."""
    import torch

    options = dict(options)
    causal, window = options.pop("causal", True), options.pop("window", None)
    options.pop("allow_short_kv", None)
    first, second = [], []
    for q_len, kv_len in zip(options["q_lens"], options["kv_lens"], strict=True):
        position = torch.arange(q_len)[:, None] + kv_len - q_len
        key = torch.arange(kv_len)[None]
        sees = (key <= position) | (not causal)
        if window is not None:
            sees &= key >= position - window
        first.append((sees & (key < kv_len // 2)).flatten())
        second.append((sees & (key >= kv_len // 2)).flatten())
    parts = [
        _attend(q, k, v, causal=False, custom_mask=torch.cat(masks), **options)
        for masks in (first, second)
    ]
    return parts[0], parts[1]


def _merged_by_ratio(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """vllm#39148: the difference of two -inf is NaN."""
    import torch

    (out_a, lse_a), (out_b, lse_b) = _prefix_and_new(q, k, v, options)
    most = torch.maximum(lse_a, lse_b)
    if mended:
        most = most.masked_fill(most == -math.inf, 0)
    weight_a, weight_b = torch.exp(lse_a - most), torch.exp(lse_b - most)
    total = weight_a + weight_b
    lse = torch.log(total) + most
    if mended:
        total = total.masked_fill(total == 0, 1)
    out = (weight_a / total)[..., None] * out_a + (weight_b / total)[..., None] * out_b
    return out.to(q.dtype), lse


def _empty_chunk(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """vllm#49294: the log-sum-exp of a chunk without keys is a finite start value."""
    out, lse = _attend(q, k, v, **options)
    return out, lse if mended else lse.masked_fill(lse == -math.inf, 0.0)


def _masked_rows(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """flashinfer#4452: -5e4 stands for -inf in scores, and is then returned as log-sum-exp."""
    out, lse = _attend(q, k, v, **options)
    return out, lse if mended else lse.clamp(min=-5e4)


def _merged_base_2(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """sglang#35045: log-sum-exps to base 2 go into a merge that takes powers of e."""
    from cpattn.merge import merge_state

    first, second = _prefix_and_new(q, k, v, options)
    factor = 1.0 if mended else 1 / math.log(2)
    out, lse = merge_state(first[0], first[1] * factor, second[0], second[1] * factor)
    return out, lse / factor


def _dropped_sink(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """TransformerEngine#3551: the helpers of the exchange do not pass the sink on."""
    if not mended:
        options["sinks"] = None
    return _attend(q, k, v, **options)


def _swallowed_sink(
    q: Any, k: Any, v: Any, *, mended: bool = False, sinks: Any = None, **kwargs: Any
) -> _Part:
    """prime-rl#3397: ``**kwargs`` takes the sink, and no code reads it."""
    return _attend(q, k, v, **kwargs, **({"sinks": sinks} if mended else {}))


def _int32_offset(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """vllm#47671: page * stride is a product of two 32-bit numbers."""
    stride = k[0].numel()
    offsets = options["block_tables"].long() * stride
    if not mended:
        offsets = (offsets + 2**31) % 2**32 - 2**31
    options["block_tables"] = (offsets // stride % len(k)).int()
    return _attend(q, k, v, **options)


def _hidden_by_a_number(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """onnxruntime#28904: hidden scores are -1e30, so a row that sees no key has equal weights."""
    out, lse = _attend(q, k, v, **options)
    row = 0
    sequences = zip(options["block_tables"], options["q_lens"], options["kv_lens"], strict=True)
    for pages, q_len, kv_len in sequences if not mended else ():
        empty = lse[row : row + q_len] == -math.inf
        if kv_len and empty.any():
            values = v[pages.long()]
            if options.get("kv_layout") == "HND":
                values = values.transpose(1, 2)
            mean = values.flatten(0, 1)[:kv_len].float().mean(0).to(out.dtype)
            heads = mean.repeat_interleave(out.shape[1] // len(mean), 0)
            out[row : row + q_len][empty] = heads.expand(q_len, -1, -1)[empty]
        row += q_len
    return out, lse


def _16_bit_ids(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """ATOM#702: ids of blocks are packed into 16 bits."""
    if not mended:
        options["block_tables"] = options["block_tables"] & 0xFFFF
    return _attend(q, k, v, **options)


def _leaking_chunk(q: Any, k: Any, v: Any, *, mended: bool = False, **options: Any) -> _Part:
    """tt-metal#48899: from 64 cached tokens on, rows of a chunk see later ones."""
    cached = max(kv - q for q, kv in zip(options["q_lens"], options["kv_lens"], strict=True))
    if not mended and cached >= 64 and options.get("window") is None:
        options["causal"] = False
    return _attend(q, k, v, **options)


def _entry(
    bug: str,
    invariant: str,
    story: str,
    operator: Callable[..., _Part],
    without: tuple[str, ...] = (),
    shipped: Shipped | None = None,
) -> ZooEntry:
    repository, _, number = bug.partition("#")
    try_it: Callable[..., Report] = partial(
        conform, signature="cpattn", examples=0, seconds=3.0, without=without
    )
    return ZooEntry(
        bug,
        f"https://github.com/{repository}/issues/{number}",
        "conform",
        invariant,
        story,
        partial(try_it, _named(operator, mended=False)),
        partial(try_it, _named(operator, mended=True)),
        shipped,
    )


def _named(operator: Callable[..., _Part], *, mended: bool) -> Callable[..., _Part]:
    """Return the operator, broken or mended, with a name for messages."""

    def attention(q: Any, k: Any, v: Any, **options: Any) -> _Part:
        return operator(q, k, v, mended=mended, **options)

    return attention


ENTRIES = [
    _entry(
        "vllm-project/vllm#39148", "LSE",
        "The merge of two parts without keys gives NaN.", _merged_by_ratio,
        without=("sinks",),  # they would count in both parts
    ),
    _entry(
        "vllm-project/vllm#49294", "LSE",
        "A context chunk without keys returns a finite log-sum-exp.", _empty_chunk,
    ),
    _entry(
        "flashinfer-ai/flashinfer#4452", "LSE",
        "Rows that see no key have a log-sum-exp of -5e4, not -inf.", _masked_rows,
    ),
    _entry(
        "sgl-project/sglang#35045", "LSE",
        "Base-2 log-sum-exps are merged by powers of e.", _merged_base_2,
        without=("sinks",),
        shipped=Shipped(
            "sglang 0.5.23",
            "`DeepseekMHAForwardMixin.forward_normal_chunked_kv_core` with the "
            "`FlashInferMhaChunkKVRunner` of `flashinfer_mla_backend` and its own `merge_state`; "
            "FlashInfer itself, which needs a GPU, is cpattn's of the same names, with the base 2 "
            "that FlashInfer documents",
            "sglang 0.5.23 merges parts by powers of another base than their log-sum-exp has",
            "the log-sum-exp times ln 2 where the runner gets it",
            "tests_py/integrations/sglang/test_sglang_shipped_merge.py",
        ),
    ),
    _entry(
        "NVIDIA/TransformerEngine#3551", "LSE",
        "Helpers of the point-to-point exchange drop the sink.", _dropped_sink,
    ),
    _entry(
        "PrimeIntellect-ai/prime-rl#3397", "LSE",
        "Sinks vanish in **kwargs under context parallelism.", _swallowed_sink,
    ),
    _entry(
        "vllm-project/vllm#47671", "ADDR",
        "The offset of a page overflows 32 bits.", _int32_offset,
    ),
    _entry(
        "microsoft/onnxruntime#28904", "LSE",
        "Rows that see no key come out as the mean of the values.", _hidden_by_a_number,
        without=("sinks",),
    ),
    _entry(
        "ROCm/ATOM#702", "ADDR",
        "Ids of blocks are cut to 16 bits.", _16_bit_ids,
    ),
    _entry(
        "tenstorrent/tt-metal#48899", "COV",
        "Rows of a chunk behind 64 cached tokens or more see later rows.", _leaking_chunk,
    ),
]  # fmt: skip
