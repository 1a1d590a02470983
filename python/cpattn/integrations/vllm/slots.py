# SPDX-License-Identifier: Apache-2.0
"""Slots of new tokens when ranks of decode context parallelism share a KV cache."""

from __future__ import annotations

import numpy as np
import torch

from ...kv import TokenInterleave


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Write the slot of each new token of a batch, or `PAD_ID` if another rank keeps it.

    vLLM has a Triton kernel for this, and for CPUs a function that refuses several ranks
    (``vllm/utils/cpu_triton_utils.py``), which this one replaces; one rank has vLLM's kernel.
    """
    if TOTAL_CP_WORLD_SIZE == 1:
        torch.ops._C.compute_slot_mapping_kernel_impl(
            query_start_loc, positions, block_table, slot_mapping, KV_CACHE_BLOCK_SIZE
        )
        return
    ends = query_start_loc.numpy()
    count = int(ends[-1])
    placement = TokenInterleave(
        shard_size=TOTAL_CP_WORLD_SIZE, interleave=CP_KV_CACHE_INTERLEAVE_SIZE
    )
    given = positions[:count].numpy()
    block, offset = np.divmod(placement.local_index(given), KV_CACHE_BLOCK_SIZE)
    request = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    slots = block_table.numpy()[request, block].astype(np.int64) * KV_CACHE_BLOCK_SIZE + offset
    is_local = placement.owner_of(given) == TOTAL_CP_RANK
    written = slot_mapping.numpy()
    written[:count] = np.where(is_local, slots, PAD_ID)
    written[count:max_num_tokens] = PAD_ID
