# SPDX-License-Identifier: Apache-2.0
"""A rank that records its own calls of `ContextParallel`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.proof import capture

LENS = {"extend_lens": [9, 4], "seq_lens": [14, 4], "block_tables": [[0, 2, 3, 1], [5, -1, -1, -1]]}


def record_layer(rank: int, folder: Path, strategy: str = "zigzag") -> list[int]:
    """Two batches; what the rank has sent after each of them."""
    sent = []
    with capture(folder / "run{rank}.cpcap"):
        cp = ContextParallel(dist.group.WORLD, strategy=strategy, page_size=4, transport="tcp")
        for _ in range(2):
            plan = cp.plan(**LENS)
            rows = torch.randn(plan.num_tokens, 2, 16)
            q, k = cp.shard(plan, rows), cp.shard(plan, rows[:, :1])
            caches = torch.zeros(2, 6, 4, 1, 16)
            cp.write_kv(plan, k, k, *caches)
            cp.attend(plan, q, *caches)
            sent.append(cp.sent_bytes)
    return sent
