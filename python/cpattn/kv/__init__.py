# SPDX-License-Identifier: Apache-2.0
"""KV pools: pages of keys and values of all layers, and writes into them.

    pool = MHATokenToKVPool(
        size=65536, page_size=128, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    )
    pool.set_kv_buffer(layer, slots, k, v)

``mha`` has the pool of dense attention, ``mla`` of latent attention with or without index keys,
``dsa`` of its FP8 rows, ``buffers`` their common base, and ``numa`` memory on chosen NUMA nodes.
``placement`` maps tokens to ranks if a group of ranks shares a pool or its sequences,
``striped_allocator`` manages free pages of such a pool, ``shard_gather`` plans what ranks send each
other before a layer reads cached prefixes, and ``units`` where compressed units go. ``pages``
writes and moves rows in pages of an engine or of another library. Imports NumPy, ``sparse``,
``context_parallel`` and the core, and torch or ml_dtypes when a pool needs them.
"""

from .dsa import DSATokenToKVPool
from .mha import MHATokenToKVPool
from .mla import MLATokenToKVPool
from .numa import NumaMemory
from .pages import move_rows, write_pages
from .placement import PageInterleave, Placement, TokenInterleave
from .shard_gather import ShardGatherPlan, plan_shard_gather
from .striped_allocator import StripedAllocator
from .units import plan_units

__all__ = [
    "DSATokenToKVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "NumaMemory",
    "PageInterleave",
    "Placement",
    "ShardGatherPlan",
    "StripedAllocator",
    "TokenInterleave",
    "move_rows",
    "plan_shard_gather",
    "plan_units",
    "write_pages",
]
