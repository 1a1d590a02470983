# SPDX-License-Identifier: Apache-2.0
"""Bugs of engines in selections of keys for sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...conformance.runner import conform
from ...findings import Report
from ..entry import ZooEntry

_SLOTS = 4096
_BUCKET_SHIFT = 18  # leaves sign, exponent and five bits of the fraction


def _bucket(scores: Any, lengths: Any, topk: int, *, mended: bool) -> Any:
    """b12x#55: the bucket of the threshold has 4096 slots; later candidates are lost."""
    import torch

    out = torch.full((len(scores), topk), -1, dtype=torch.int32)
    for row, all_scores, length in zip(out, scores, lengths.tolist(), strict=True):
        own, count = all_scores[:length].contiguous(), min(topk, length)
        if not count:
            continue
        bucket = own.view(torch.int32) >> _BUCKET_SHIFT
        threshold = bucket.sort(descending=True).values[count - 1]
        above = torch.nonzero(bucket > threshold)[:, 0]
        at = torch.nonzero(bucket == threshold)[:, 0]
        at = at if mended else at[:_SLOTS]
        best = own[at].sort(descending=True, stable=True).indices[: count - len(above)]
        chosen = torch.cat([above, at[best]])
        row[: len(chosen)] = chosen
    return out


def _local(
    indices: Any, *, dcp_rank: int, dcp_size: int, interleave_size: int, mended: bool
) -> Any:
    """vllm#54541: keys of a rank are looked up by their positions in the whole sequence."""
    import torch

    owner = indices // interleave_size % dcp_size
    own = (indices >= 0) & (owner == dcp_rank)
    place = indices // (interleave_size * dcp_size) * interleave_size + indices % interleave_size
    out = torch.full_like(indices, -1)
    for row, mine, values in zip(out, own, place if mended else indices, strict=True):
        row[: int(mine.sum())] = values[mine]
    return out


def _hidden_by_float16(
    scores: Any, lengths: Any, topk: int, row_starts: Any = None, *, mended: bool
) -> Any:
    """cudnn-frontend#446: columns without a candidate get the lowest number of float16."""
    import torch

    from cpattn.sparse.sglang_0_5_23 import fast_topk

    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    column = torch.arange(scores.shape[1])
    inside = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    if mended:
        return fast_topk(scores, lengths, topk, row_starts)
    scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf).masked_fill(~inside, -65504.0)
    chosen = fast_topk(scores, torch.full_like(lengths, len(column)), topk)
    none = (torch.arange(topk) >= lengths[:, None]) | (chosen < 0)
    return torch.where(none, -1, chosen - starts[:, None])


def _above_threshold(
    scores: Any, lengths: Any, topk: int, row_starts: Any = None, *, mended: bool
) -> Any:
    """vllm#50201: NaN is neither above a threshold nor equal to it, so its place stays empty."""
    import torch

    from cpattn.sparse.sglang_0_5_23 import fast_topk

    chosen = fast_topk(scores, lengths, topk, row_starts)
    if mended:
        return chosen
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    columns = (chosen + starts[:, None]).clamp(min=0)
    return torch.where(scores.gather(1, columns.long()).isnan(), -1, chosen)


def _entry(
    bug: str, kind: str, story: str, operator: Callable[..., Any], signature: str, *without: str
) -> ZooEntry:
    repository, _, number = bug.partition("#")
    try_it: Callable[..., Report] = partial(
        conform, signature=signature, examples=0, seconds=3.0, without=without
    )
    return ZooEntry(
        bug,
        f"https://github.com/{repository}/{kind}/{number}",
        "conform",
        "TOPK",
        story,
        partial(try_it, _named(operator, mended=False)),
        partial(try_it, _named(operator, mended=True)),
    )


def _named(operator: Callable[..., Any], *, mended: bool) -> Callable[..., Any]:
    """Return the operator, broken or mended, with a name for messages."""

    def select(*arguments: Any, **options: Any) -> Any:
        return operator(*arguments, mended=mended, **options)

    return select


ENTRIES = [
    _entry(
        "local-inference-lab/b12x#55", "pull",
        "Candidates beyond the 4096 slots of a bucket were lost.", _bucket, "topk", "starts",
        "low", "nan",
    ),
    _entry(
        "vllm-project/vllm#54541", "issues",
        "Selected positions of the sequence were looked up in the table of a rank.", _local,
        "dcp_local_indices",
    ),
    _entry(
        "NVIDIA/cudnn-frontend#446", "issues",
        "Lanes without a candidate had a score of -65504, above real ones.", _hidden_by_float16,
        "topk",
    ),
    _entry(
        "vllm-project/vllm#50201", "issues",
        "Rows with NaN among their scores came back with fewer than k keys.", _above_threshold,
        "topk",
    ),
]  # fmt: skip
