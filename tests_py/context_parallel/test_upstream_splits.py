# SPDX-License-Identifier: Apache-2.0
"""Splits of torch itself: its head-tail balancer is the strategy zigzag."""

from __future__ import annotations

import numpy as np
import pytest

import cpattn

pytest.importorskip("torch")

from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_torch_head_tail(size, chunk):
    """All blocks are equal, because it takes multiples of twice the ranks alone."""
    length = 2 * size * chunk
    theirs = _HeadTailLoadBalancer(length, size, "cpu")._generate_indices()
    plans = cpattn.build_cp_metadata_all_ranks([length], cp_size=size, strategy="head_tail")
    ours = np.concatenate([plan.local_q_indices for plan in plans])
    assert np.array_equal(ours, np.asarray(theirs).reshape(-1))
