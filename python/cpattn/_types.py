# SPDX-License-Identifier: Apache-2.0
"""Types in the signatures of public functions, for type checkers of users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsFloat, SupportsIndex, TypeAlias, TypeVar


class Tensor(Protocol):
    """Tensor that the core can read: a torch CPU tensor, a NumPy array, or another with DLPack.

    A list is no tensor, as it has no dtype. NumPy types ``__dlpack__`` for numbers only, but a mask
    has bools; the other half of the protocol therefore covers masks.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __dlpack_device__(self) -> Any: ...


# Results come in the container of the arguments: torch gives torch, NumPy gives NumPy.
TensorT = TypeVar("TensorT", bound=Tensor)

# A tensor in a container that no signature states: a view of a pool, or code for both containers.
AnyTensor: TypeAlias = Any

# Ints: a list or tuple of them, or an int32 or int64 tensor of one dimension.
Indices: TypeAlias = Sequence[SupportsIndex] | Tensor

# Factors of the numbers in a cache: one number or a tensor of numbers; None stands for 1.
KVScale: TypeAlias = SupportsFloat | Tensor | None

# Ints of two dimensions, such as a block table.
IndexTable: TypeAlias = Sequence[Sequence[SupportsIndex]] | Tensor

# Floats: a list or tuple of them, or a float32 or float64 tensor of one dimension.
Reals: TypeAlias = Sequence[SupportsFloat] | Tensor

# One bool, or one for each sequence.
Flags: TypeAlias = bool | Sequence[bool] | Tensor

# Summands of scores: one tensor, or one per sequence.
ScoreBias: TypeAlias = Tensor | Sequence[Tensor] | None

# Number of visible keys before and behind a token's own, None for no limit. A single number, under
# a causal mask, is the left side.
Window: TypeAlias = SupportsIndex | Sequence[SupportsIndex | None] | None
