# SPDX-License-Identifier: Apache-2.0
"""Reductions by all operators of `torch.distributed.ReduceOp`, in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.distributed import ReduceOp

from ..findings import NotUsable

_PAIRWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def kind_of(op: Any) -> Any:
    """Return the enumerator of an operator, which may also have a factor."""
    return getattr(op, "op", op)


def name_of(op: Any) -> str:
    """Return the name of an operator in programs."""
    return str(kind_of(op)).rpartition(".")[2]


def reduced(op: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce the tensors of all ranks, in rank order."""
    kind = kind_of(op)
    if kind not in _PAIRWISE:
        raise NotUsable(f"simulate: the operator {name_of(op)} is not known")
    if kind == ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        tensors = [tensor * factor for tensor in tensors]
    result = reduce(_PAIRWISE[kind], tensors)
    if kind == ReduceOp.AVG:
        rounding = None if result.is_floating_point() or result.is_complex() else "trunc"
        result = torch.div(result, len(tensors), rounding_mode=rounding)
    return result
