# SPDX-License-Identifier: Apache-2.0
"""Signatures of attention operators, with one module per library.

``signature``   their interface, for your own adapters
"""

from __future__ import annotations

from types import MappingProxyType

from ..cases import Features
from . import attention_interface, flash_attn, flashinfer, npu, own, sdpa
from .signature import Answer, Signature

__all__ = ["SIGNATURES", "Answer", "Features", "Signature"]

#: Signatures by their names in `conform`.
SIGNATURES = MappingProxyType(
    {
        signature.name: signature
        for signature in (
            own.SIGNATURE,
            sdpa.SIGNATURE,
            flash_attn.VARLEN,
            flash_attn.KVCACHE,
            flashinfer.SIGNATURE,
            npu.SIGNATURE,
            attention_interface.SIGNATURE,
        )
    }
)
