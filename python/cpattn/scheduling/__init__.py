# SPDX-License-Identifier: Apache-2.0
"""Batches of requests: the next tokens to compute, and their pages.

    cache = PrefixCache(num_pages, page_size=16, block_tokens=512)
    for batch in prefill_batches(requests, cache, token_budget=4096):
        ...  # runs batch.extend_lens behind batch.prefix_lens

``request``       a request: lengths, and a hash of each block of its prompt
``prefix_cache``  pages of a KV pool, shared through hash blocks, least recently used ones evicted;
                  ``free_pages`` manages pages without an owner
``scheduler``     batches under a token budget: chunks of prompts, and generated tokens

Imports NumPy and `cpattn.kv` only.
"""

from .prefix_cache import Block, Lease, PrefixCache
from .request import Request, hash_blocks
from .scheduler import Batch, Chunk, Scheduler, prefill_batches

__all__ = [
    "Batch",
    "Block",
    "Chunk",
    "Lease",
    "PrefixCache",
    "Request",
    "Scheduler",
    "hash_blocks",
    "prefill_batches",
]
