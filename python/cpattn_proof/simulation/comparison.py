# SPDX-License-Identifier: Apache-2.0
"""Digests of given and returned values of ranks, for comparing runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from ..findings import Finding
from .calls import Call, Site
from .in_flight import PLAIN, bytes_of

_COMPARED = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Step:
    """Call of a rank, or its end."""

    rank: int
    what: str
    site: Site | None
    digest: bytes


Trace = list[list[Step]]  # steps of each rank


def trace_of(history: Sequence[Sequence[Call]], results: Sequence[Any]) -> Trace:
    """Return all steps that distinguish a run from another."""
    return [
        [*map(_step, calls), Step(rank, "what it returns", None, _digest_of(results[rank]))]
        for rank, calls in enumerate(history)
    ]


def difference(one: Trace, other: Trace) -> tuple[Step, Step] | None:
    """Return the first steps that differ, of the lowest rank."""
    for steps, others in zip(one, other, strict=True):
        for step, another in zip(steps, others, strict=False):
            if (step.what, step.digest) != (another.what, another.digest):
                return step, another
    return None


def finding_of(step: Step, seeds: tuple[int, int], ranks: int) -> Finding:
    """Return the finding of results that depend on the order of arrival."""
    first, second = seeds
    return Finding(
        "SEQ",
        f"{step.what} on rank {step.rank} depends on the order in which ranks arrive: "
        f"seeds {first} and {second} differ",
        where=str(step.site or ""),
        ranks=(step.rank,),
        picture=f"cpattn simulate --ranks {ranks} --seed {first} --seed {second} ... replays both",
        advice="Receive from ranks by name, and combine in the order of ranks.",
        kind="order-of-arrival",
        details={"seeds": list(seeds)},
    )


def _step(call: Call) -> Step:
    return Step(call.world_rank, str(call), call.site, call.digest)


def digest_of_given(call: Call) -> bytes:
    """Return the digest of all tensors that a call gives."""
    return _digest_of([copy for _, copy in call.kept])


def _digest_of(value: Any) -> bytes:
    hashed = blake2b(digest_size=16)
    for part in _parts(value):
        hashed.update(part)
    return hashed.digest()


def _parts(value: Any) -> Iterator[bytes]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if not _has_bytes(leaf):
                yield f"{leaf.dtype} {leaf.layout} {leaf.device}".encode()
                continue
            yield f"{leaf.dtype} {tuple(leaf.shape)}".encode()
            if leaf.numel():
                yield bytes_of(leaf).numpy().tobytes()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            yield f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
        elif isinstance(leaf, _COMPARED):
            yield repr(leaf).encode()


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Tell whether values can be compared; of other tensors, e.g. sparse, only metadata can."""
    dense = type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_nested
    return dense and tensor.device.type == "cpu"
