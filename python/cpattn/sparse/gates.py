# SPDX-License-Identifier: Apache-2.0
"""Gates that tell whether the prefill of a sparse-attention (DSA) model may be split over ranks."""

from __future__ import annotations

from .. import _core
from .._types import Indices
from ..context_parallel.forward_mode import ForwardMode


def can_dsa_prefill_cp_interleave(
    extend_lens: Indices, *, cp_size: int, strategy: str, forward_mode: ForwardMode | None
) -> bool:
    """Tell whether a sparse-attention (DSA) model may split this prefill token by token.

    The conditions are strategy ``interleave``, a mode whose new tokens may be split
    (`ForwardMode.EXTEND` or `ForwardMode.MIXED`), and ``sum(extend_lens) >= cp_size > 1``.

    Parameters
    ----------
    extend_lens : ints [bs]
        New tokens of each sequence.
    cp_size : int
        Ranks of the context-parallel group, 1 to 32768.
    strategy : str
        A strategy of `cpattn.build_cp_metadata` or one of its other names, such as
        ``"round-robin-split"`` for ``"interleave"``.
    forward_mode : ForwardMode or None
        Mode of the batch. None may not be split.

    Returns
    -------
    bool

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        If a length is negative, `cp_size` is out of range, or the strategy or mode is unknown.

    Examples
    --------
    >>> from cpattn import ForwardMode
    >>> rule = {"cp_size": 4, "strategy": "interleave", "forward_mode": ForwardMode.EXTEND}
    >>> can_dsa_prefill_cp_interleave([3, 1], **rule), can_dsa_prefill_cp_interleave([3], **rule)
    (True, False)
    """
    return _core.can_dsa_prefill_cp_interleave(extend_lens, cp_size, strategy, forward_mode)


def dsa_use_prefill_cp(
    forward_mode: ForwardMode | None, *, has_cp_metadata: bool, enabled: bool
) -> bool:
    """Tell whether this forward pass of a sparse-attention (DSA) model is split over ranks.

    The conditions are that context parallelism is enabled, the batch has metadata for it, and the
    mode allows splitting new tokens.

    Parameters
    ----------
    forward_mode : ForwardMode or None
        Mode of the batch. None is never split.
    has_cp_metadata : bool
        Whether the batch has context-parallel metadata.
    enabled : bool
        Whether the server runs prefill with context parallelism.

    Returns
    -------
    bool

    Raises
    ------
    TypeError, ValueError
        If a flag is no bool, or the mode no member of ForwardMode.

    Examples
    --------
    >>> from cpattn import ForwardMode
    >>> dsa_use_prefill_cp(ForwardMode.EXTEND, has_cp_metadata=True, enabled=True)
    True
    >>> dsa_use_prefill_cp(ForwardMode.DECODE, has_cp_metadata=True, enabled=True)
    False
    """
    function = "dsa_use_prefill_cp"
    has_cp_metadata = _core.flag(has_cp_metadata, function, "has_cp_metadata")
    enabled = _core.flag(enabled, function, "enabled")
    if forward_mode is None:
        return False
    mode = _core.integer(forward_mode, function, "forward_mode")
    if mode not in set(ForwardMode):
        raise ValueError(f"{function}: forward_mode must be a ForwardMode, got {mode}")
    return has_cp_metadata and enabled and ForwardMode(mode).is_context_parallel_extend()
