# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: which tokens each rank computes, and how many keys they see.

    plan = build_cp_metadata([10, 14], [15, 14], cp_rank=1, cp_size=2)
    hidden = plan.shard(hidden)  # and, of all ranks' rows, plan.unshard(parts)

``metadata`` has the strategies, and is where to start; ``gates`` says whether to split a batch at
all, ``forward_mode`` what a batch is for, ``shard`` moves rows, ``attention`` computes them;
``exchanges`` counts what ranks would receive; ``halo`` plans rows that a layer needs of other
ranks, or in another layout; ``vllm_0_32`` alone has the rule and the names of
that release. Imports NumPy and the core. Several processes: `cpattn.distributed`.
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
