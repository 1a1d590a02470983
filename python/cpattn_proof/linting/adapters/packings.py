# SPDX-License-Identifier: Apache-2.0
"""Packed sequences (cu_seqlens) over ranks, as in ring-flash-attn and Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...findings import NotUsable
from ..document import SCHEMA
from ..intervals import Ints, ints, offsets
from .runs import requests_of, row_runs, tokens_of
from .windows import pass_window


def from_llama3(
    cu_seqlens: Sequence[int],
    ranks: Sequence[tuple[Any, Any, slice]],
    *,
    window: int | None = None,
) -> dict[str, Any]:
    """Make a document of consecutive rows with gathered keys.

    Parameters
    ----------
    cu_seqlens : ints [n + 1]
        Offsets of the whole batch.
    ranks : sequence of (cu_seqlens_q, cu_seqlens_k, local_k_slice)
        Arguments of each rank, as ``llama3_flash_attn_prepare_cu_seqlens`` of ring-flash-attn
        returns them (without the maxima).
    window : int, optional
        Number of visible keys before a query's own, ``window_size[0]`` of the calls.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If the offsets of queries and keys of a rank differ in length.

    Examples
    --------
    >>> from cpattn_proof import lint
    >>> ranks = [([0, 3], [0, 3], slice(0, 3)), ([0, 1, 3], [0, 4, 6], slice(0, 6))]
    >>> lint(from_llama3([0, 4, 6], ranks)).proved
    True
    """
    extend = np.diff(ints(cu_seqlens))
    prefix, base = np.zeros_like(extend), ints(cu_seqlens)
    parts, begin = [], 0
    for number, (cu_q, cu_k, keys) in enumerate(ranks):
        q, k = ints(cu_q), ints(cu_k)
        if len(q) != len(k):
            raise NotUsable(
                f"from_llama3: rank {number} must have as many offsets of queries as of keys, got "
                f"{len(q)} and {len(k)}"
            )
        flat = np.arange(begin, begin + int(q[-1]))
        owner, position = tokens_of(flat[flat < base[-1]], extend, prefix)
        first = keys.start + k[:-1]
        request = np.minimum(np.searchsorted(base, first, side="right") - 1, len(extend) - 1)
        parts.append({
            "rows": row_runs(owner, position),
            "segments": {
                "request": request.tolist(), "row": q[:-1].tolist(), "rows": np.diff(q).tolist(),
                "keys": np.diff(k).tolist(), "first": (first - base[request]).tolist(),
            },
        })  # fmt: skip
        begin += int(q[-1])
    document = {"schema": SCHEMA, "requests": requests_of(extend, prefix), "ranks": parts}
    pass_window(document, window, causal=True)
    return document


def from_zigzag_ring(
    cu_seqlens: Sequence[int],
    cp_size: int,
    cu_seqlens_padded: Sequence[int] | None = None,
    key_lens: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Make a document of a zigzag ring: each rank has two blocks, and keys go round.

    The rule is that of ``zigzag_ring_flash_attn_varlen_func`` of ring-flash-attn, and of Megatron's
    packed sequences (THD) with padding.

    Parameters
    ----------
    cu_seqlens : ints [n + 1]
        Offsets of the sequences, without padding.
    cp_size : int
        Number of ranks; twice the number must divide the padded length of each sequence.
    cu_seqlens_padded : ints [n + 1], optional
        Offsets with padding after each sequence; default: no padding.
    key_lens : sequence of ints [n], optional
        Number of keys of each sequence that a rank sends, as its own code counts them; default:
        keys without padding.

    Returns
    -------
    dict
        A document of the schema `SCHEMA`.

    Raises
    ------
    NotUsable
        If a sequence cannot be cut into equal blocks.

    Examples
    --------
    >>> from cpattn_proof import lint
    >>> lint(from_zigzag_ring([0, 8, 24], cp_size=2)).proved
    True
    >>> padded = from_zigzag_ring([0, 698], 4, [0, 704])
    >>> lint(padded).proved
    True
    >>> lint(from_zigzag_ring([0, 698], 4, [0, 704], [[698 // 4]] * 4)).findings[0].invariant
    'COV'
    """
    real = np.diff(ints(cu_seqlens))
    padded = real if cu_seqlens_padded is None else np.diff(ints(cu_seqlens_padded))
    if (padded % (2 * cp_size)).any() or (padded < real).any():
        raise NotUsable(
            f"from_zigzag_ring: padded lengths must be multiples of {2 * cp_size} and hold the "
            f"sequences, got {padded.tolist()} for {real.tolist()}"
        )
    block = padded // (2 * cp_size)
    have = [_real_keys(real, block, rank, cp_size) for rank in range(cp_size)]
    sent = have if key_lens is None else [ints(lens) for lens in key_lens]
    ranks = [_ring_rank(rank, block, have, sent, cp_size) for rank in range(cp_size)]
    requests = requests_of(real, np.zeros_like(real))
    for request, pad in zip(requests, (padded - real).tolist(), strict=True):
        request["pad"] = pad
    return {"schema": SCHEMA, "requests": requests, "ranks": ranks}


def _real_keys(real: Ints, block: Ints, rank: int, cp_size: int) -> Ints:
    """Return the tokens of a rank without padding."""
    first = np.clip(real - rank * block, 0, block)
    return first + np.clip(real - (2 * cp_size - 1 - rank) * block, 0, block)


def _ring_rank(
    rank: int, block: Ints, have: list[Ints], sent: list[Ints], cp_size: int
) -> dict[str, Any]:
    """Return rows of both blocks of every sequence, and a call for each source of keys."""
    count = len(block)
    both = np.stack([rank * block, (2 * cp_size - 1 - rank) * block], axis=1)
    rows = {
        "request": np.repeat(np.arange(count), 2).tolist(),
        "position": both.reshape(-1).tolist(),
        "count": np.repeat(block, 2).tolist(),
    }
    begin = offsets(2 * block)[:-1]
    calls: list[tuple[tuple[Ints, Ints, Ints], int, int]] = []
    for source in range(cp_size):
        own, keys = have[rank], sent[source]
        if source == rank:
            calls.append(((begin, own, keys), 1, source))
        elif source < rank:  # both blocks see the first block of that rank
            calls.append(((begin, own, np.minimum(keys, block)), 0, source))
        else:  # the second block sees all keys of that rank
            calls.append(((begin + block, np.maximum(own - block, 0), keys), 0, source))
    names = ("row", "rows", "keys")
    segments = {
        name: [n for columns, _, _ in calls for n in columns[i].tolist()]
        for i, name in enumerate(names)
    }
    segments["request"] = list(range(count)) * cp_size
    segments["step"] = [step for _, step, _ in calls for _ in range(count)]
    segments["from"] = [source for _, _, source in calls for _ in range(count)]
    return {"rows": rows, "segments": segments}
