# SPDX-License-Identifier: Apache-2.0
"""Request of an engine, as its scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from .._arguments import items
from .._limits import check_integer, check_kind


@dataclass(frozen=True)
class Request:
    """One request; equal leading `hash_ids` of two requests are a shared, cacheable prefix.

    Attributes
    ----------
    timestamp : int
        Arrival, in ms.
    input_length, output_length : int
        Tokens of the prompt, and tokens of the answer.
    hash_ids : tuple of int
        Hash of each block of the prompt; the last block may be partial.

    Examples
    --------
    >>> request = Request(timestamp=0, input_length=700, output_length=20, hash_ids=(0, 7))
    >>> len(request.hash_ids) == -(-request.input_length // 512)  # blocks of 512 tokens
    True
    """

    timestamp: int  # arrival, ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]  # one per block of the input, the last block may be partial


def checked_requests(function: str, requests: Any) -> tuple[Request, ...]:
    """Return requests as a tuple; TypeError for anything else."""
    listed = items(requests, function, "requests")
    for i, request in enumerate(listed):
        check_kind(function, f"requests[{i}]", request, Request)
    return listed


def hash_blocks(token_ids: Any, block_tokens: int) -> tuple[int, ...]:
    """Hash the tokens of each block of a prompt into 128 bits; the last block may be partial.

    Parameters
    ----------
    token_ids : ints [num_tokens]
    block_tokens : int
        Tokens per block, as in the `PrefixCache`.

    Returns
    -------
    tuple of int

    Raises
    ------
    TypeError, ValueError
        If a number is no integer, or `block_tokens` below 1.

    Examples
    --------
    >>> first, second = hash_blocks([5, 6, 7, 8], 4), hash_blocks([5, 6, 7, 8, 9], 4)
    >>> len(second), first[0] == second[0]
    (2, True)
    """
    check_integer("hash_blocks", "block_tokens", block_tokens)
    ids = np.asarray(token_ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"hash_blocks: token_ids must be integers, got {ids.dtype}")
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    return tuple(
        int.from_bytes(blake2b(ids[i : i + block_tokens].data, digest_size=16).digest(), "little")
        for i in range(0, len(ids), block_tokens)
    )
