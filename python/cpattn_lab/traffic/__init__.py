# SPDX-License-Identifier: Apache-2.0
"""Requests of serving traffic, read from a file or generated, and their tokens.

    requests = generate_trace(64, seed=1)
    batches = prefill_batches(requests, cache, token_budget=4096)  # of cpattn.scheduling

Imports NumPy and `cpattn.scheduling` only.
"""

from cpattn.scheduling.request import Request

from .trace import (
    TRACE_BLOCK_TOKENS,
    block_tokens_of,
    generate_trace,
    read_trace,
    scale_lengths,
    unbounded_hits,
)

__all__ = [
    "TRACE_BLOCK_TOKENS",
    "Request",
    "block_tokens_of",
    "generate_trace",
    "read_trace",
    "scale_lengths",
    "unbounded_hits",
]
