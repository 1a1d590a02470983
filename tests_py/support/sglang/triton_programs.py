# SPDX-License-Identifier: Apache-2.0
"""Kernels that are written for Triton, run program by program on CPU tensors.

As far as the kernels of sglang need it that tests run: what a program loads, computes and stores is
done by torch, one element type and one rounding at a time, without a compiler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


class Pointer:
    """Elements of a tensor, by their offsets."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"Pointer: tensor must be contiguous, got strides {tensor.stride()}")
        self.elements, self.offset = tensor.view(-1), torch.as_tensor(offset)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.elements, self.offset + offset)

    def seen(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets, 0 where the mask hides them, and the mask."""
        shown = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        at = torch.where(shown, self.offset, 0)
        if ((at < 0) | (at >= max(len(self.elements), 1)))[shown].any():
            raise IndexError(f"offsets must be below {len(self.elements)}, got {at.max()}")
        return at, shown


class Language:
    """Names of ``triton.language``, in the program that runs."""

    int32 = torch.int32

    def __init__(self) -> None:
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def num_programs(self, axis: int) -> int:
        return self.grid[axis]

    def load(self, pointer: Pointer, mask: Any = None) -> torch.Tensor:
        at, shown = pointer.seen(mask)
        if not len(pointer.elements):
            return torch.zeros(at.shape, dtype=pointer.elements.dtype)
        return torch.where(shown, pointer.elements[at], 0)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        at, shown = pointer.seen(mask)
        value = torch.as_tensor(value).to(pointer.elements.dtype).expand(at.shape)
        pointer.elements[at[shown]] = value[shown]

    def arange(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end)

    def maximum(self, a: Any, b: Any) -> torch.Tensor:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    def exp(self, x: Any) -> torch.Tensor:
        return torch.exp(torch.as_tensor(x))

    def log(self, x: Any) -> torch.Tensor:
        return torch.log(torch.as_tensor(x))

    def cdiv(self, a: Any, b: int) -> int:
        return -(-int(a) // b)


class Kernel:
    """What ``@triton.jit`` makes of a function: ``kernel[grid](...)`` runs all programs."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = getattr(function, "fn", function)  # of Triton's own, where it is installed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            given = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in arguments]
            language = Language()
            language.grid = grid
            with mock.patch.dict(self.function.__globals__, tl=language):
                for program in itertools.product(*map(range, grid)):
                    language.program = program
                    self.function(*given)

        return launch


def next_power_of_2(n: int) -> int:
    return 1 << math.ceil(math.log2(n)) if n > 1 else 1
