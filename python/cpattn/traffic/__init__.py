# SPDX-License-Identifier: Apache-2.0
"""Requests of serving traffic, and the prefill batches that they become.

    requests = generate_trace(64, seed=1)
    batches = prefill_batches(requests, cache, token_budget=4096, max_sequences=64)

``trace``         requests, read from a file or generated, and the tokens they stand for
``prefix_cache``  pages of a KV pool, shared through hash blocks, least recently used ones evicted;
                  ``free_pages`` are those that nobody has
``scheduler``     prefill batches under a token budget

Imports NumPy and `cpattn.kv` only.
"""

from .prefix_cache import Block, Lease, PrefixCache
from .scheduler import Batch, Chunk, prefill_batches
from .trace import (
    TRACE_BLOCK_TOKENS,
    Request,
    block_tokens_of,
    generate_trace,
    read_trace,
    scale_lengths,
    unbounded_hits,
)

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "Batch",
    "Block",
    "Chunk",
    "Lease",
    "PrefixCache",
    "Request",
    "block_tokens_of",
    "generate_trace",
    "prefill_batches",
    "read_trace",
    "scale_lengths",
    "unbounded_hits",
]
