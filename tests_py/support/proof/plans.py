# SPDX-License-Identifier: Apache-2.0
"""Complete documents of correct plans, for tests to damage."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

import cpattn
from cpattn_proof import lint
from cpattn_proof.linting.adapters.context_parallel import from_metadata

STRATEGIES = ("zigzag", "interleave", "contiguous")
PAGE_SIZE = 4


def document_of(extend, prefix, cp_size, strategy="zigzag", **options: Any) -> dict[str, Any]:
    """Return a plan of cpattn as a document, with the options of `from_metadata`."""
    seq_lens = [cached + new for cached, new in zip(prefix, extend, strict=True)]
    plans = cpattn.build_cp_metadata_all_ranks(extend, seq_lens, cp_size=cp_size, strategy=strategy)
    return from_metadata(plans, extend, prefix, **options)


def with_cache(document: dict[str, Any]) -> dict[str, Any]:
    """Return the plan with own pages for each request, and every rank's writes to them."""
    tables, page = [], 1
    for request in document["requests"]:
        count = -(-(request["prefix"] + request["extend"]) // PAGE_SIZE)
        tables.append(list(range(page, page + count)))
        page += count
    cache = {"page_size": PAGE_SIZE, "num_pages": page, "tables": tables, "padding_page": 0}
    writes: dict[str, list[int]] = {"request": [], "position": [], "count": [], "slot": []}
    for number, request in enumerate(document["requests"]):
        for position in range(request["prefix"], request["prefix"] + request["extend"]):
            slot = tables[number][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for name, value in zip(writes, (number, position, 1, slot), strict=True):
                writes[name].append(value)
    ranks = [rank | {"writes": deepcopy(writes)} for rank in document["ranks"]]
    return document | {"cache": cache, "ranks": ranks}


@st.composite
def batches(draw, most_tokens: int = 40) -> tuple[list[int], list[int], int, str]:
    """Draw new tokens, cached tokens, ranks and strategy, with uneven, empty and short batches."""
    size = draw(st.integers(1, 4))
    extend = draw(st.lists(st.integers(0, most_tokens), min_size=size, max_size=size))
    prefix = draw(st.lists(st.integers(0, most_tokens), min_size=size, max_size=size))
    return extend, prefix, draw(st.integers(1, 6)), draw(st.sampled_from(STRATEGIES))


def kinds(document: dict[str, Any]) -> set[str]:
    return {found.kind for found in lint(document, shrink=False).findings}


def segments_of_vllm(ranks: Any) -> list[list[SimpleNamespace]]:
    """Return segments of ranks as objects with vLLM's fields."""
    return [
        [
            SimpleNamespace(
                global_batch_req_idx=request,
                global_batch_slice=slice(begin, end),
                rank_local_batch_slice=slice(row, stop),
            )
            for request, begin, end, row, stop in zip(*rank, strict=True)
        ]
        for rank in ranks
    ]
