# SPDX-License-Identifier: Apache-2.0
"""The types in the signatures of public functions, for a user's type checker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsFloat, SupportsIndex, TypeAlias, TypeVar

__all__ = [
    "AnyTensor",
    "Flags",
    "IndexTable",
    "Indices",
    "KVScale",
    "ScoreBias",
    "Tensor",
    "TensorT",
    "Window",
]


class Tensor(Protocol):
    """Tensor that the core can read: of torch on the CPU, of NumPy, or another with DLPack.

    A list is no tensor: it has no dtype. NumPy types ``__dlpack__`` for numbers only, and a mask is
    of bools; hence the other half of the protocol.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


# Results come in the container of the arguments: torch gives torch, NumPy gives NumPy.
TensorT = TypeVar("TensorT", bound=Tensor)

# A tensor whose container no signature tells: what a pool shows, or what code for both works on.
AnyTensor: TypeAlias = Any

# Ints: a list or tuple of them, or an int32 or int64 tensor of one dimension.
Indices: TypeAlias = Sequence[SupportsIndex] | Tensor

# What the numbers of a cache are multiplied with: one number or a tensor of them; None is 1.
KVScale: TypeAlias = SupportsFloat | Tensor | None

# The same of two dimensions, such as a block table.
IndexTable: TypeAlias = Sequence[Sequence[SupportsIndex]] | Tensor

# Floats: a list or tuple of them, or a float32 or float64 tensor of one dimension.
Reals: TypeAlias = Sequence[SupportsFloat] | Tensor

# One bool, or one for each sequence.
Flags: TypeAlias = bool | Sequence[bool] | Tensor

# Numbers that are added to scores: a tensor, or one for each sequence.
ScoreBias: TypeAlias = Tensor | Sequence[Tensor] | None

# Keys before and behind a token's own that it sees, None for no limit. One number, under a causal
# mask, is the left side.
Window: TypeAlias = SupportsIndex | Sequence[SupportsIndex | None] | None
