# SPDX-License-Identifier: Apache-2.0
"""Whether the prefill of a sparse-attention (DSA) model is split over ranks."""

from __future__ import annotations

from .. import _core
from .._types import Indices
from ..context_parallel.forward_mode import ForwardMode

__all__ = ["can_dsa_prefill_cp_interleave", "dsa_use_prefill_cp"]


def can_dsa_prefill_cp_interleave(
    extend_lens: Indices, *, cp_size: int, strategy: str, forward_mode: ForwardMode | None
) -> bool:
    """Whether a sparse-attention (DSA) model may split this prefill token by token.

    True for strategy ``interleave``, a context-parallel extend mode, and
    ``sum(extend_lens) >= cp_size > 1``.
    """
    return _core.can_dsa_prefill_cp_interleave(extend_lens, cp_size, strategy, forward_mode)


def dsa_use_prefill_cp(
    forward_mode: ForwardMode | None, *, has_cp_metadata: bool, enabled: bool
) -> bool:
    """Whether this forward pass of a sparse-attention (DSA) model is split over ranks.

    It is if context parallelism is enabled, the batch got metadata for it, and its mode is one
    whose new tokens may be split.
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
