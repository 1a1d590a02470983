# SPDX-License-Identifier: Apache-2.0
"""Modes of a forward pass."""

from __future__ import annotations

from enum import IntEnum

from .. import _core


class ForwardMode(IntEnum):
    """Mode of a forward pass, with the names and numbers of serving engines.

    Examples
    --------
    >>> ForwardMode.MIXED.is_extend(), ForwardMode.DECODE.is_extend(), int(ForwardMode.IDLE)
    (True, False, 4)
    """

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    PREBUILT = 7
    SPLIT_PREFILL = 8
    DLLM_EXTEND = 9

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """Tell whether new tokens are computed after cached ones; drafts count only on request."""
        return _core.is_extend(self, include_draft_extend_v2)

    is_prefill = is_extend  # its other name

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """Tell whether context parallelism may split the new tokens."""
        return _core.is_context_parallel_extend(self, include_draft_extend_v2)

    def is_extend_without_speculative(self) -> bool:
        """Tell whether `is_extend` holds and the batch does not verify drafts."""
        return _core.is_extend_without_speculative(self)

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        """Tell whether it is EXTEND, MIXED or SPLIT_PREFILL."""
        return _core.is_extend_or_draft_extend_or_mixed(self)

    def is_decode_or_idle(self) -> bool:
        """Tell whether each sequence has one new token, or there is none."""
        return _core.is_decode_or_idle(self)

    def is_cpu_graph(self) -> bool:
        """Tell whether a graph of the CPU may replay the batch."""
        return _core.is_cpu_graph(self)

    def is_cuda_graph(self) -> bool:
        """Tell whether a graph of CUDA may replay the batch."""
        return _core.is_cuda_graph(self)

    def is_decode(self) -> bool:
        """Tell whether each sequence has one new token."""
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        """Tell whether chunks of prompts run together with decoding."""
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        """Tell whether this rank has no sequences while another rank has some."""
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        """Tell whether the model verifies the tokens of a draft."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        """Tell whether a draft model extends after verified tokens."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_prebuilt(self) -> bool:
        """Tell whether keys and values came from a prefill server."""
        return self is ForwardMode.PREBUILT

    def is_split_prefill(self) -> bool:
        """Tell whether a prompt runs through some layers at a time."""
        return self is ForwardMode.SPLIT_PREFILL

    def is_dllm_extend(self) -> bool:
        """Tell whether a diffusion model extends by a block."""
        return self is ForwardMode.DLLM_EXTEND


ForwardMode.__module__ = "cpattn"
