# SPDX-License-Identifier: Apache-2.0
"""Attention over halves of the keys, to be merged."""

from __future__ import annotations

from itertools import pairwise

import cpattn


def split_keys(inputs, splits):
    """Attention over consecutive slices of the keys of one sequence, not causal."""
    pages = inputs["block_tables"][0]
    for begin, end in pairwise(splits):
        part = inputs | {
            "kv_lens": [(end - begin) * 16],
            "block_tables": [pages[begin:end].tolist()],
        }
        yield cpattn.paged_attention(**part, causal=False, return_lse=True)
