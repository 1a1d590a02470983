# SPDX-License-Identifier: Apache-2.0
"""Whether a batch is worth splitting over ranks."""

from __future__ import annotations

from .. import _core
from .._types import Indices
from .forward_mode import ForwardMode

__all__ = ["can_apply_cp"]


def can_apply_cp(
    extend_lens: Indices,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    forward_mode: ForwardMode | None = ForwardMode.EXTEND,
) -> bool:
    """Whether a batch is worth splitting over `cp_size` ranks; engines fall back otherwise.

    Pseudo-code::

        cp_size > 1 and forward_mode.is_context_parallel_extend() and
            zigzag:      num_tokens >= 2 * cp_size and min(extend_lens) >= 2 * cp_size
            contiguous:  num_tokens >= cp_size     and min(extend_lens) >= cp_size
            interleave:  sum(extend_lens) >= cp_size

    `num_tokens` defaults to the sum of `extend_lens`. A `forward_mode` of None passes for
    zigzag and contiguous, and does not for interleave.
    """
    return _core.can_apply_cp(extend_lens, cp_size, strategy, num_tokens, forward_mode)
