# SPDX-License-Identifier: Apache-2.0
"""What a batch is forwarded for."""

from __future__ import annotations

from enum import IntEnum

from .. import _core

__all__ = ["ForwardMode"]


class ForwardMode(IntEnum):
    """What a batch is forwarded for, as serving engines name and number it."""

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
        return _core.is_extend(self, include_draft_extend_v2)

    def is_prefill(self, include_draft_extend_v2: bool = False) -> bool:
        return _core.is_extend(self, include_draft_extend_v2)

    def is_context_parallel_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """Whether context parallelism may split the new tokens."""
        return _core.is_context_parallel_extend(self, include_draft_extend_v2)

    def is_extend_without_speculative(self) -> bool:
        return _core.is_extend_without_speculative(self)

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return _core.is_extend_or_draft_extend_or_mixed(self)

    def is_decode_or_idle(self) -> bool:
        return _core.is_decode_or_idle(self)

    def is_cpu_graph(self) -> bool:
        return _core.is_cpu_graph(self)

    def is_cuda_graph(self) -> bool:
        return _core.is_cuda_graph(self)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_prebuilt(self) -> bool:
        return self is ForwardMode.PREBUILT

    def is_split_prefill(self) -> bool:
        return self is ForwardMode.SPLIT_PREFILL

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND


ForwardMode.__module__ = "cpattn"
