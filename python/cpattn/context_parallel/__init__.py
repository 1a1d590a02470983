# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: which tokens each rank computes, and how many keys they see.

    plan = build_cp_metadata([10, 14], [15, 14], cp_rank=1, cp_size=2)
    hidden = plan.shard(hidden)  # and, of all ranks' rows, plan.unshard(parts)

``metadata`` has the strategies; start there. ``gates`` tells whether to split a batch at all,
``forward_mode`` names the mode of a batch, ``shard`` moves rows, ``attention`` computes them;
``exchanges`` counts received bytes; ``halo`` plans rows that a layer needs from other ranks or in
another layout; only ``vllm_0_32`` has the rule and names of that release. Imports NumPy and the
core. For several processes use `cpattn.distributed`.
"""

from . import halo as halo
from . import vllm_0_32 as vllm_0_32
from .attention import attend_rank, do_cp_attn_fia
from .forward_mode import ForwardMode
from .gates import can_apply_cp
from .metadata import ContextParallelMetadata, build_cp_metadata, build_cp_metadata_all_ranks

__all__ = [
    "ContextParallelMetadata",
    "ForwardMode",
    "attend_rank",
    "build_cp_metadata",
    "build_cp_metadata_all_ranks",
    "can_apply_cp",
    "do_cp_attn_fia",
]
