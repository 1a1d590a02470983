# SPDX-License-Identifier: Apache-2.0
"""vLLM's all-gather in shared memory, which its tensor-parallel ranks of a host use on a CPU."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import Any

IDENTITY = "VLLM_DIST_IDENT"  # by which vLLM's ranks find the memory that they share


def is_there() -> bool:
    return find_spec("vllm") is not None


def make_communicator(identity: str) -> Any:
    """A `CpuCommunicator` of all ranks, with an identity that only these ranks share."""
    import torch
    import torch.distributed as dist

    os.environ[IDENTITY] = identity
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    module = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    made = module.CpuCommunicator(
        dist.group.WORLD,
        device=torch.device("cpu"),
        device_group=dist.group.WORLD,
        unique_name="tp:0",
    )
    if not isinstance(made.dist_module, module._CPUSHMDistributed):
        raise RuntimeError("vLLM's ranks do not share memory here")
    return made
