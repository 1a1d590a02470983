# SPDX-License-Identifier: Apache-2.0
"""Table of all exchanges and placements with their requirements; the core counts their bytes.

`ContextParallel`, the cost model and the replay read these tables. A new exchange needs an entry in
``cpp/meta/context_parallel/exchange_bytes.cc``, a module of its name in ``distributed/layers``,
which ``sharded_attend`` runs, and its work in the cost model; a test names missing parts.
"""

from __future__ import annotations

from .. import _core

PLACEMENTS = {
    "replicated": "every rank has all keys",
    "page_interleave": "a rank keeps every cp_size-th page of a sequence",
    "token_interleave": "a rank keeps every cp_size-th token of a sequence, or run of tokens",
}
LSE_BYTES = _core.LSE_BYTES
SCRATCH_BYTES = 256 << 20  # the default of ContextParallel's max_scratch_bytes
EXCHANGES = _core.exchanges()
ON_ALL_RANKS = tuple(name for name, exchange in EXCHANGES.items() if not exchange.needs_mesh)
"""Names of the exchanges that need no mesh."""
