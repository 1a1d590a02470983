# SPDX-License-Identifier: Apache-2.0
"""The worlds that tests of ranks run in."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from support.distributed.distributed_worker import run_world
from support.time_limits import PATIENCE

pytestmark = pytest.mark.slow


def _fail_on_the_last(rank: int) -> None:
    assert rank < dist.get_world_size() - 1, "as the test wants"
    dist.recv(torch.zeros(1), dist.get_world_size() - 1)  # which never sends


def test_the_traceback_of_a_rank_that_fails_comes_at_once(tmp_path):
    """Though the others, of which the first is asked first, wait for it."""
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)^rank 2 of 3:\nTraceback.*as the test wants"):
        run_world(3, tmp_path, _fail_on_the_last)
    assert time.monotonic() - start < PATIENCE / 4
