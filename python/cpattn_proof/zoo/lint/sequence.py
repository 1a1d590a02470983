# SPDX-License-Identifier: Apache-2.0
"""SEQ: ranks that do not meet. ADDR: buffers and products that are too small."""

from __future__ import annotations

from typing import Any

from ._documents import Document, document, entry


def _calls(ranks: list[list[dict[str, Any]]]) -> Document:
    return document(ranks=[{"collectives": calls} for calls in ranks])


def _draft_steps(mended: bool) -> Document:
    """A rank without requests makes one draft step, other ranks make three."""
    steps = {0: 3 if mended else 1, 1: 3}
    step = {"kind": "all_gather", "size": 64, "label": "draft step"}
    return _calls([[dict(step) for _ in range(steps[rank])] for rank in range(2)])


def _free_blocks(mended: bool) -> Document:
    """A rank asks all ranks whether to add a request, but only if it has a block itself."""
    free, needed = [4, 3], 4
    ask = {"kind": "all_reduce", "op": "min", "size": 1, "label": "can add"}
    step = {"kind": "all_gather", "size": 128, "label": "attention"}
    return _calls([[*([ask] if mended or blocks >= needed else []), step] for blocks in free])


def _prefetched_pages(mended: bool) -> Document:
    """Ranks agree on a prefetch page by page, but have found different numbers of pages."""
    found = [3, 2, 3, 3]
    agree = {"kind": "all_reduce", "op": "min", "size": 1, "label": "prefetched pages"}
    return _calls([[agree] * (1 if mended else pages) for pages in found])


def _plans_of_their_own(mended: bool) -> Document:
    """Ranks plan an all-to-all separately, and disagree about who sends a shared root."""
    want = [[0, 7, 5, 3], [4, 0, 6, 2], [5, 1, 0, 8], [2, 2, 2, 0]]
    seen = [list(row) for row in want]
    if not mended:
        seen[1][2] += 3  # rank 1 counts the root among its own rows
    return _calls([
        [{
            "kind": "all_to_all", "sends": seen[rank],
            "receives": [want[other][rank] for other in range(4)],
        }]
        for rank in range(4)
    ])  # fmt: skip


def _tokens_of_a_batch(mended: bool) -> Document:
    """Tokens were counted over data-parallel ranks only, not also over context-parallel ones."""
    groups = {"data x context": [[0, 1, 2, 3]]}
    parts = []
    for rank in range(4):
        group = [0, 1, 2, 3] if mended else [rank % 2, rank % 2 + 2]
        call = {"kind": "all_reduce", "op": "sum", "size": 1, "group": group, "label": "tokens"}
        parts.append({"collectives": [call | {"over": "data x context"}]})
    return document(ranks=parts, groups=groups)


def _ranks_without_tokens(mended: bool) -> Document:
    """A rank without tokens in a step returned before it told the others."""
    tokens = [5, 0, 3, 4]
    notify = {"kind": "all_gather", "size": 4, "label": "tokens to come"}
    return _calls([[notify] if mended or count else [] for count in tokens])


def _slots_for_drafts(mended: bool) -> Document:
    """A step of twelve requests with five drafts each over four ranks needs 110 slots, not 104."""
    used = 110
    buffer = {"name": "slot_mapping", "size": used if mended else 104, "used": used}
    return document(ranks=[{"buffers": [buffer]}])


def _page_times_stride(mended: bool) -> Document:
    """The offset of a page is a product of two 32-bit numbers."""
    bits = 64 if mended else 32
    product = {"name": "page offset", "index": 7768, "stride": 480 * 576, "bits": bits}
    return document(ranks=[{"products": [product]}])


ENTRIES = [
    entry(
        "vllm-project/vllm-ascend#12036", "SEQ",
        "One rank made one draft step, another three.", _draft_steps, "pull",
    ),
    entry(
        "NVIDIA/TensorRT-LLM#14020", "SEQ",
        "A rank with too few free blocks left out the call that asks all ranks.", _free_blocks,
        "pull",
    ),
    entry(
        "sgl-project/sglang#30760", "SEQ",
        "Ranks agreed on a prefetch as often as each had found pages.", _prefetched_pages,
    ),
    entry(
        "OpenPipe/ART#840", "SEQ",
        "Ranks disagreed about the sizes of an all-to-all.", _plans_of_their_own,
    ),
    entry(
        "verl-project/verl#6049", "SEQ",
        "Tokens of a batch were counted over data parallel ranks, not over context parallel ones.",
        _tokens_of_a_batch,
    ),
    entry(
        "uccl-project/uccl#940", "SEQ",
        "A rank without tokens left out the call that the others wait in.", _ranks_without_tokens,
        "pull",
    ),
    entry(
        "vllm-project/vllm-ascend#14024", "ADDR",
        "110 slots of a step with drafts went into a buffer of 104.", _slots_for_drafts, "pull",
    ),
    entry(
        "vllm-project/vllm#47671", "ADDR",
        "The page times the stride overflowed 32 bits.", _page_times_stride, "pull",
    ),
]  # fmt: skip
