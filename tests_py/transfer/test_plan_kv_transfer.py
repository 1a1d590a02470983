# SPDX-License-Identifier: Apache-2.0
"""plan_kv_transfer is right in small cases that can be read."""

import re

import numpy as np
import pytest

from cpattn.transfer import KVEntry, KVLayout, plan_kv_transfer
from support.transfer.plan_blocks import blocks

PAGES = 64


def layout(base, *, ids=range(2), kinds=("k", "v"), lengths=(512, 128), draft=0, page_size=16,
           **placement):  # fmt: skip
    """Lay out groups of layers, then groups of draft layers, 1 MiB apart."""
    entries = []
    for is_draft, layers in ((False, ids), (True, range(draft))):
        for kind, length in zip(kinds, lengths, strict=False):
            for layer in layers:
                addr = base + (len(entries) << 20)
                entries.append(KVEntry(layer, kind, is_draft, addr, PAGES * length, length))
    return KVLayout(entries, page_size, **placement)


SRC, DST = 1 << 48, 1 << 49


def test_entry_major_blocks_of_the_fewest_runs():
    """Runs join, out of the order of the request, if both sides are consecutive."""
    pages = np.array([[7, 2, 3, 8], [41, 20, 21, 42]], np.int32)
    plan = plan_kv_transfer(layout(SRC), layout(DST), *pages)
    assert plan == plan_kv_transfer(layout(SRC), layout(DST), *pages.astype(np.int64).tolist())
    expected = [
        (SRC + (entry << 20) + src * item, DST + (entry << 20) + dst * item, 2 * item)
        for entry, item in enumerate((512, 512, 128, 128))
        for src, dst in ((2, 20), (7, 41))
    ]
    assert blocks(plan) == expected
    for pages, options in (([], {}), ([1], {"num_tokens": 0})):
        assert len(plan_kv_transfer(layout(SRC), layout(DST), pages, pages, **options)) == 0


NOT_DISTINCT = "destination pages must be distinct, got page 3 for two parts"
NOT_THERE = "source pages must hold tokens "
OF_BOTH = "num_tokens must be given where the pages of both sides do not end at one token, got "
INDEXED = {"kinds": ["k", "v", "index_k"], "lengths": [512, 128, 32]}
DCP = {"dcp_size": 2, "dcp_interleave": 4}
REFUSALS = [
    # A row has changes of the destination, pages, arguments and a message.
    ({"ids": [0]}, [1], [2], {}, "source has k of layer 1 (item_len 512), which destination has n"),
    ({"ids": [0, 1, 2]}, [1], [2], {}, "destination has k of layer 2 (item_len 512), which sourc"),
    ({"kinds": ["k"]}, [1], [2], {}, "source has v of layer 0 (item_len 128), which destination h"),
    (INDEXED, [1], [2], {}, "destination has index_k of layer 0 (item_len 32), which source has n"),
    ({"lengths": [512, 64]}, [1], [2], {}, "v of layer 0 must have the same bytes for each token"),
    ({}, [1], [2, 3], {}, OF_BOTH + "1 of 16 at the source, ending at 16, and 2 of 16 at the dest"),
    ({}, [1, 2], [3, 3], {}, NOT_DISTINCT),
    ({}, [1, 2], [3, 3], {"first_token": 16}, NOT_DISTINCT),  # the prefix would be overwritten
    # A page is refused even if its parts write different rows, or come from different ranks.
    ({}, [1, 2], [3, 3], {"first_token": 12, "num_tokens": 8}, NOT_DISTINCT),
    ({}, [1, 2], [3, 3], {"cp_size": 2}, NOT_DISTINCT),
    ({}, [1, -1], [3, 4], {}, "source pages must be in [0, 64) for k of layer 0, got -1 at"),
    ({}, [1], [64], {}, "destination pages must be in [0, 64) for k of layer 0, got 64 at"),
    ({}, [1, 2], [3, 4], {"num_tokens": 33}, NOT_THERE + "[0, 33), got 2 of 16 from 0 on"),
    ({}, [1, 2], [3, 4], {"src_start": 8}, "src_start must be the first token of a page of 16, go"),
    ({}, [1, 2], [3, 4], {"src_start": 16, "first_token": 0, "num_tokens": 1},
     NOT_THERE + "[0, 1), got 2 of 16 from 16 on"),
    ({}, [1, 2], [3, 4], {"first_token": 33}, NOT_THERE + "[33, 32), got 2 of 16 from 0 on"),
    ({}, [1, 2], [3, 4], {"dst_start": 16}, OF_BOTH),
    ({}, [1, 2], [3, 4], {"cp_rank": 1}, "cp_rank must be in [0, cp_size), got 1 of 1"),
    ({}, [1, 2], [3, 4], {"cp_share": "heads"}, 'cp_share must be pages or layers, got "heads"'),
    (DCP, [1, 2], [3], {}, "num_tokens must be given with dcp_size 2"),
    (DCP, [1, 2], [3], {"num_tokens": 4, "dst_start": 16},
     "dst_start must be the first token of a page of 16 on ev"),
    (DCP, [1, 2, 3], [3], {"num_tokens": 33}, "destination pages must hold tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "src", "dst", "arguments", "message"), REFUSALS)
def test_refused(changes, src, dst, arguments, message):
    with pytest.raises(ValueError, match=f"^plan_kv_transfer: {re.escape(message)}"):
        plan_kv_transfer(layout(SRC), layout(DST, **changes), src, dst, **arguments)


def entry_layouts(*addrs):
    """Lay out a layer of 512 bytes at each address."""
    return KVLayout([KVEntry(i, "k", False, addr, 512, 512) for i, addr in enumerate(addrs)], 16)


def test_refused_links():
    """A link is refused if no other link could repair it."""
    for src, dst, message in [
        (entry_layouts(SRC, SRC + 512), entry_layouts(DST, DST + 511),
         "destination buffers must not overlap, got k of layer 0"),
        (layout(SRC, tp_size=2, total_kv_heads=4), layout(DST, total_kv_heads=2),
         "total_kv_heads must be the same on both sides, got 4 at"),
        (layout(SRC, dcp_size=2), layout(DST), "source must hold all tokens of its pages, got dcp"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            plan_kv_transfer(src, dst, [0], [0])


def test_pages_that_are_not_written_may_repeat():
    """The dummy page stands for pages outside an attention window, and after the end."""
    pages = [1, 2, 3, 4, 5]
    plan = plan_kv_transfer(
        layout(SRC), layout(DST), pages, [0, 0, 7, 0, 0], first_token=32, num_tokens=16
    )
    assert plan == plan_kv_transfer(layout(SRC), layout(DST), [3], [7])


def test_draft_layers_of_both_sides_must_be_the_same():
    message = re.escape("destination has k of draft layer 1 (item_len 512), which source has not")
    with pytest.raises(ValueError, match=f"{message}$"):
        plan_kv_transfer(layout(SRC, draft=1), layout(DST, draft=2), [0], [0])
    plan = plan_kv_transfer(layout(SRC, draft=1), layout(DST), [0], [0])
    assert plan.parts == [("k", 2, 2), ("v", 2, 2)]


def test_buffers_of_a_source_may_be_shared():
    plan = plan_kv_transfer(entry_layouts(SRC, SRC), entry_layouts(DST, DST + 512), [0], [0])
    assert blocks(plan) == [(SRC, DST, 512), (SRC, DST + 512, 512)]


def packed(base, **placement):
    """Lay out pages without rows of tokens: 64 keys of 128 bytes, then 64 scales of 4 bytes."""
    entry = KVEntry(0, "index_k", False, base, 10 * 8448, 8448, token_rows=False)
    return KVLayout([entry], **({"page_size": 64} | placement))


def test_packed_pages_go_whole():
    plan = plan_kv_transfer(packed(SRC), packed(DST), [3, 4, 9], [1, 2, 5], num_tokens=129)
    assert blocks(plan) == [
        (SRC + 3 * 8448, DST + 8448, 2 * 8448),
        (SRC + 9 * 8448, DST + 5 * 8448, 8448),
    ]
    tail = plan_kv_transfer(packed(SRC), packed(DST), [3, 4], [1, 2], first_token=64)
    assert blocks(tail) == [(SRC + 4 * 8448, DST + 2 * 8448, 8448)]
    for rank in range(2):  # both have the latent, and each sends to its own
        ranks = {"tp_rank": rank, "tp_size": 2, "total_kv_heads": 1}
        assert len(plan_kv_transfer(packed(SRC, **ranks), packed(DST, **ranks), [3], [1])) == 1
    for rank in range(2):  # pages are interleaved
        dcp = {"dcp_rank": rank, "dcp_size": 2, "dcp_interleave": 128}
        plan = plan_kv_transfer(
            packed(SRC), packed(DST, **dcp), [0, 1, 2, 3], [5, 6], num_tokens=256
        )
        assert blocks(plan) == [(SRC + rank * 2 * 8448, DST + 5 * 8448, 2 * 8448)]


@pytest.mark.parametrize(
    ("changes", "entry", "arguments"),
    [
        ({}, {}, {"first_token": 1}),
        ({"page_size": 16}, {"item_len": 2112}, {}),
        ({"dcp_size": 2}, {}, {"num_tokens": 64}),
        ({}, {"token_rows": True}, {}),
    ],
)
def test_parts_of_packed_pages_are_refused(changes, entry, arguments):
    entries = [packed(DST).entries[0]._replace(nbytes=8448, **entry)]
    to = KVLayout(entries, **({"page_size": 64} | changes))
    with pytest.raises(ValueError, match=r"index_k of layer 0 .*(whole pages|not rows of tokens)"):
        plan_kv_transfer(packed(SRC), to, [0], list(range(64 // to.page_size)), **arguments)
