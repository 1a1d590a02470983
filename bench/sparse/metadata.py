# SPDX-License-Identifier: Apache-2.0
"""The metadata of an attention backend for a batch before its first layer, in every pass.

The peer restates sglang 0.5.23's torch code in our own words: the same tensors by the same steps.
Each copies a page table, which takes most of the time of large batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import cpattn
from bench.harness.comparison import Comparison, Wrong

PAGE_SIZE, TOPK = 64, 2048
Fields = dict[str, torch.Tensor]


def comparisons(quick: bool) -> Iterator[Comparison]:
    for mode in (cpattn.ForwardMode.EXTEND, cpattn.ForwardMode.DECODE):
        for batch in (2,) if quick else (1, 256):
            yield of_batch(mode, batch)


def of_batch(mode: cpattn.ForwardMode, batch: int) -> Comparison:
    rng = random.Random(batch)
    decode = mode is cpattn.ForwardMode.DECODE
    extend_lens = [1 if decode else rng.randrange(1, 256) for _ in range(batch)]
    seq_lens = [n + rng.randrange(4096) for n in extend_lens]
    pages = torch.randperm(batch * 128, generator=torch.Generator().manual_seed(batch))
    slots = pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
    req_to_token = slots.reshape(batch, -1).int()  # for up to 8192 tokens each
    requests = torch.randperm(batch, generator=torch.Generator().manual_seed(batch))

    def ours() -> cpattn.sparse.DsaMetadata:
        return cpattn.sparse.build_dsa_metadata(
            extend_lens,
            seq_lens,
            forward_mode=mode,
            topk=TOPK,
            fp8_kv_cache=True,
            prefill_impl="flashmla_sparse",
            page_size=PAGE_SIZE,
            req_to_token=req_to_token,
            req_pool_indices=requests,
        )

    def theirs() -> Fields:
        ragged = mode is cpattn.ForwardMode.EXTEND
        return in_torch(extend_lens, seq_lens, req_to_token, requests, ragged)

    expected = theirs()

    def check(name: str, result: Any) -> float:
        for field, wanted in expected.items():
            got = result[field] if name == "torch" else getattr(result, field)
            if not np.array_equal(got, wanted):
                raise Wrong(f"{field} differs")
        return 0.0

    rows = sum(extend_lens)
    return Comparison(
        "metadata",
        {"job": f"metadata, {mode.name.lower()}", "batch": batch, "threads": 1},
        {"cpattn": ours, "torch": theirs},
        check,
        work=(rows / 1e9, "Grow"),
        items=(batch, "sequence"),
    )


def in_torch(
    extend_lens: list[int],
    seq_lens: list[int],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    ragged: bool,
) -> Fields:
    """The steps of the engine for a batch in mode EXTEND, with an FP8 cache, or DECODE."""
    kv_lens = torch.tensor(seq_lens, dtype=torch.int32)
    counts = torch.tensor(extend_lens, dtype=torch.int32)
    page_table = req_to_token[req_pool_indices, : max(seq_lens)]
    expanded = torch.cat(
        [
            torch.arange(kv - new + 1, kv + 1, dtype=torch.int32)
            for new, kv in zip(extend_lens, seq_lens, strict=True)
        ]
    )
    selected = expanded.clamp(max=TOPK)
    fields = {
        "cache_seqlens": kv_lens,
        "cu_seqlens_q": offsets(counts),
        "cu_seqlens_k": offsets(kv_lens),
        "seqlens_expanded": expanded,
        "dsa_cache_seqlens": selected,
        "dsa_cu_seqlens_k": offsets(selected),
        "page_table_1": page_table,
        "real_page_table": page_table[:, ::PAGE_SIZE] // PAGE_SIZE,
    }
    if ragged:
        starts = fields["cu_seqlens_k"][:-1]
        fields["topk_indices_offset"] = torch.repeat_interleave(starts, counts)
        rows = zip(page_table, seq_lens, strict=True)
        fields["page_table_1_flattened"] = torch.cat([row[:n] for row, n in rows])
    return fields


def offsets(lens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
