# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over several processes: split tokens, gather K and V once, attend.

Every rank of a ``torch.distributed`` group knows the same requests and has a KV pool of its own::

    cp = ContextParallel(group, strategy="zigzag", page_size=128)
    plan = cp.plan(extend_lens, seq_lens, block_tables=block_tables)  # once per batch
    hidden, positions = cp.shard(plan, hidden), cp.shard(plan, positions)
    cp.write_kv(plan, k, v, k_cache, v_cache)  # for every layer
    out = cp.attend(plan, q, k_cache, v_cache)  # for every layer
    hidden = cp.gather(plan, hidden)

``plan``, ``shard`` and ``attend`` are local. ``write_kv`` and ``gather`` exchange rows: all ranks
call them, in the same order. The ranks first compare a few digests, as backends do not detect ranks
with different sizes and then read stale rows or abort.

With a `placement`, the pools of each rank hold only a share of the keys: ``write_kv`` sends rows to
their owners, and ``attend`` and ``decode`` exchange rows, too. ``prefetch`` sends the cached keys
of a layer while the previous layer is computed.

Ranks of one host may share a pool made with ``memory=cp.shared_memory()``: ``write_kv`` then writes
the rows of each rank in place, and sends nothing.
"""

from .context_parallel import ContextParallel
from .layers.choice import ExchangeChoice
from .layers.prefetch import LayerCaches, Prefetch
from .plans.plan import ContextParallelPlan
from .plans.sharded_plan import DecodePlan, ShardedPlan
from .transport.shared_memory import SharedMemory
from .transport.topology import Topology

__all__ = [
    "ContextParallel",
    "ContextParallelPlan",
    "DecodePlan",
    "ExchangeChoice",
    "LayerCaches",
    "Prefetch",
    "ShardedPlan",
    "SharedMemory",
    "Topology",
]
