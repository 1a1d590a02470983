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
    """Tell whether a batch is worth splitting over `cp_size` ranks; engines fall back otherwise.

    Pseudo-code::

        cp_size > 1 and forward_mode.is_context_parallel_extend() and
            zigzag:      num_tokens >= 2 * cp_size and min(extend_lens) >= 2 * cp_size
            contiguous:  num_tokens >= cp_size     and min(extend_lens) >= cp_size
            interleave:  sum(extend_lens) >= cp_size

    Parameters
    ----------
    extend_lens : ints [bs]
        New tokens of each sequence.
    cp_size : int
        Number of ranks.
    strategy : str
        ``"zigzag"``, ``"interleave"``, ``"contiguous"`` or an alias, as for `build_cp_metadata`.
    num_tokens : int, optional
        Tokens of the batch with padding, by default the sum of `extend_lens`.
    forward_mode : ForwardMode or None
        What the batch is for. None passes for zigzag and contiguous, and does not for interleave.

    Returns
    -------
    bool

    Raises
    ------
    TypeError
        For lengths or sizes that are no integers, and a mode that is none.
    ValueError
        For negative lengths, no sequences, a size below 1 and an unknown strategy.

    Examples
    --------
    >>> [can_apply_cp([4, 9], cp_size=size) for size in (1, 2, 3)]  # 2 * 3 blocks for 4 tokens
    [False, True, False]
    """
    return _core.can_apply_cp(extend_lens, cp_size, strategy, num_tokens, forward_mode)
