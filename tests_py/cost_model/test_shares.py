# SPDX-License-Identifier: Apache-2.0
"""Sequences into which rows are cut where keys are shared out, against plans of real calls."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import cpattn
from cpattn.distributed.layers.ring import ring_pages
from cpattn.distributed.plans.sequence_calls import Visibility, sequence_calls
from cpattn.distributed.plans.tokens import Rows
from cpattn.kv import PageInterleave, TokenInterleave
from cpattn_lab.cost_model import AttentionLayer, exchange_work
from support.distributed.planning import key_shares
from support.tolerances import SEQUENCE_ENDS

PAGE = 32


def keys_of(size, placement, length):
    made = {
        "page_interleave": lambda: PageInterleave(shard_size=size, page_size=PAGE),
        "token_interleave": lambda: TokenInterleave(shard_size=size, interleave=1),
    }[placement]()
    pages = -(-length // PAGE)
    return key_shares(made, np.arange(pages, dtype=np.int32)[None], np.array([length]), PAGE)


def packed_keys(shares, size, rows, item):
    """Keys that the items of work of calls to all shares pack."""
    packed = 0.0
    for share in range(size):
        pages = ring_pages(shares, share)
        for call in sequence_calls(shares, share, pages, rows, Visibility(True, None, None)):
            items = -(-np.asarray(call.q_lens) // item)
            keys = (np.diff(call.kv_indptr) - 1) * call.page_size + call.last_page_len
            # Items of causal rows pack the keys up to their last row.
            hidden = np.asarray(call.q_lens) * (items - 1) / 2 if call.causal else 0 * items
            packed += float((items * keys - hidden).sum())
    return packed


@pytest.mark.parametrize("placement", ["page_interleave", "token_interleave"])
def test_a_ring_packs_keys_for_each_of_its_sequences(placement):
    """Every rank's rows, by zigzag: items of 96 tokens, but where sequences are shorter."""
    size, new, length = 2, 376 * PAGE, 512 * PAGE
    layer = AttentionLayer(num_heads=4, num_kv_heads=1, head_dim=128, page_size=PAGE)
    work = exchange_work(
        [new], [length], cp_size=size, layer=layer, placement=placement, exchange="ring"
    )
    plans = cpattn.build_cp_metadata_all_ranks([new], [length], cp_size=size)
    shares = keys_of(size, placement, length)
    for rank, plan in enumerate(plans):
        positions = np.asarray(plan.query_cache_lengths, np.int64) - 1
        rows = Rows(np.zeros(len(positions), np.int64), positions)
        packed = packed_keys(shares, size, rows, item=96)
        assert work.packed_keys[rank] == pytest.approx(packed, rel=SEQUENCE_ENDS)
