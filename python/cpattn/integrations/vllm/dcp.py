# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="import-not-found"
"""Decode context parallelism (DCP) of vLLM on a CPU: ranks share the cached keys of each sequence.

A rank keeps its turns of the cached tokens, and has all new tokens of a step. It attends to its
share with the queries of all ranks' heads. The ranks then exchange these parts, and each merges the
parts of its own heads with the result of its new tokens.
"""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import get_dcp_group


def gather_heads(query: torch.Tensor) -> torch.Tensor:
    """Return the queries [num_tokens, num_heads * ranks, head_dim] of all ranks' heads."""
    gathered: torch.Tensor = get_dcp_group().all_gather(query.contiguous(), dim=1)
    return gathered


def swap_parts(x: torch.Tensor) -> list[torch.Tensor]:
    """Send each rank the part of its heads of x [num_tokens, num_heads * ranks, ...].

    The result has the parts of all ranks for this rank's heads, each [num_tokens, num_heads, ...].
    """
    group = get_dcp_group()
    parts = x.unflatten(1, (group.world_size, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group.device_group)
    return list(received)
