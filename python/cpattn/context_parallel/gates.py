# SPDX-License-Identifier: Apache-2.0
"""Gate that tells whether splitting a batch over ranks pays."""

from __future__ import annotations

from .. import _core
from .._types import Indices
from .forward_mode import ForwardMode


def can_apply_cp(
    extend_lens: Indices,
    *,
    cp_size: int,
    strategy: str = "zigzag",
    num_tokens: int | None = None,
    forward_mode: ForwardMode | None = ForwardMode.EXTEND,
) -> bool:
    """Tell whether splitting a batch over `cp_size` ranks pays; if not, engines run it unsplit.

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
        Tokens of the batch with padding. Default: the sum of `extend_lens`.
    forward_mode : ForwardMode or None
        Mode of the batch. None counts as allowed for zigzag and contiguous, not for interleave.

    Returns
    -------
    bool

    Raises
    ------
    TypeError
        If lengths or sizes are no integers, or `forward_mode` is no mode.
    ValueError
        If a length is negative, no sequence is given, a size is below 1, or `strategy` is unknown.

    Examples
    --------
    >>> [can_apply_cp([4, 9], cp_size=size) for size in (1, 2, 3)]  # 2 * 3 blocks for 4 tokens
    [False, True, False]
    """
    return _core.can_apply_cp(extend_lens, cp_size, strategy, num_tokens, forward_mode)
