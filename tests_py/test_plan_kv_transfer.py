# SPDX-License-Identifier: Apache-2.0
"""plan_kv_transfer on small cases that can be read."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cpattn import KVEntry, KVLayout, plan_kv_transfer

PAGES = 64


def layout(base, *, ids=range(2), kinds=("k", "v"), lengths=(512, 128), draft=0, page_size=16,
           **placement):  # fmt: skip
    """Groups of layers, then groups of draft layers, 1 MiB apart."""
    entries = []
    for is_draft, layers in ((False, ids), (True, range(draft))):
        for kind, length in zip(kinds, lengths, strict=False):
            for layer in layers:
                addr = base + (len(entries) << 20)
                entries.append(KVEntry(layer, kind, is_draft, addr, PAGES * length, length))
    return KVLayout(entries, page_size, **placement)


SRC, DST = 1 << 48, 1 << 49


def blocks(plan):
    return list(zip(plan.src_addrs.tolist(), plan.dst_addrs.tolist(), plan.lengths.tolist(),
                    strict=True))  # fmt: skip


def test_entry_major_blocks_of_the_fewest_runs():
    """Runs join across the order of the request where both sides are consecutive."""
    plan = plan_kv_transfer(layout(SRC), layout(DST), [7, 2, 3, 8], [41, 20, 21, 42])
    expected = [
        (SRC + (entry << 20) + src * item, DST + (entry << 20) + dst * item, 2 * item)
        for entry, item in enumerate((512, 512, 128, 128))
        for src, dst in ((2, 20), (7, 41))
    ]
    assert blocks(plan) == expected


@pytest.mark.parametrize("dtype", [list, np.int32, np.int64])
def test_page_lists_of_every_kind(dtype):
    pages = [[3, 4, 9], [0, 1, 2]]
    lists = pages if dtype is list else np.array(pages, dtype)
    assert plan_kv_transfer(layout(SRC), layout(DST), *lists) == plan_kv_transfer(
        layout(SRC), layout(DST), *pages
    )


@pytest.mark.parametrize(
    ("changes", "pages", "message"),
    [
        ({"ids": [0]}, None, "source has k of layer 1 (item_len 512), which destination has not"),
        ({"ids": [0, 1, 2]}, None, "destination has k of layer 2 (item_len 512), which source"),
        ({"kinds": ["k"]}, None, "source has v of layer 0 (item_len 128), which destination has"),
        ({"kinds": ["k", "v", "index_k"], "lengths": [512, 128, 32]}, None,
         "destination has index_k of layer 0 (item_len 32), which source has not"),
        ({"lengths": [512, 64]}, None, "v of layer 0 must have the same bytes for each token and "
         "head on both sides, got item_len 128 for page_size 16 and 1 head(s) at the source, and "
         "64 for 16 and 1 at the destination"),
        ({}, ([1], [2, 3]), "num_tokens must be given where the pages of both sides do not end at "
         "one token, got 1 of 16 at the source, ending at 16, and 2 of 16 at the destination, "
         "ending at 32"),
        ({}, ([1, 2], [3, 3]), "destination pages must be distinct, got page 3 for two parts"),
        ({}, ([1, -1], [3, 4]), "source pages must be in [0, 64) for k of layer 0, got -1 at"),
        ({}, ([1], [64]), "destination pages must be in [0, 64) for k of layer 0, got 64 at"),
    ],
)  # fmt: skip
def test_refused(changes, pages, message):
    with pytest.raises(ValueError, match=f"^plan_kv_transfer: {re.escape(message)}"):
        plan_kv_transfer(layout(SRC), layout(DST, **changes), *(pages or ([1], [2])))
