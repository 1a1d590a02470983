# SPDX-License-Identifier: Apache-2.0
"""Ranks that are alone: in a world of one, or planning for a group that does not exist."""

from typing import Any

import torch.distributed as dist

from cpattn import _core
from cpattn.distributed import ContextParallel
from cpattn.distributed.plans.key_shares import KeyShares
from support.distributed.sharded_worker import PLACEMENTS


def first_of(size: int, page_size: int = 16, **attributes: Any) -> ContextParallel:
    """Return rank 0 of a group that does not exist, as planning needs none."""
    cp = object.__new__(ContextParallel)
    cp.cp_rank, cp.cp_size, cp.page_size = 0, size, page_size
    usual = {
        "strategy": "zigzag", "exchange": "auto", "max_scratch_bytes": 1 << 30, "mesh": None,
        "placement": PLACEMENTS["pages"](size, page_size), "weights": None, "whole_pages": False,
    }  # fmt: skip
    for name, value in (usual | attributes).items():
        setattr(cp, name, value)
    return cp


def key_shares(placement: Any, tables: Any, lens: Any, page_size: int) -> KeyShares:
    return KeyShares(placement, _core.BatchPages(tables, lens, page_size, "key_shares"))


def plan_of(cp: ContextParallel, extend: int, prefix: int) -> Any:
    """Return the plan of a request with pages in ascending order."""
    pages = -(-(extend + prefix) // cp.page_size)
    return cp.plan([extend], [extend + prefix], block_tables=[range(pages)])


def one_rank(**options: Any) -> ContextParallel:
    """Return the only rank of a world, with pools sharded by pages of 4 tokens."""
    usual = {"page_size": 4, "placement": PLACEMENTS["pages"](1, 4)}
    return ContextParallel(dist.group.WORLD, **usual | options)
