# SPDX-License-Identifier: Apache-2.0
"""An operator of attention, or one that selects keys, tried on many batches; faults have names.

``runner``       `conform`, and the report
``trials``       cases tried and judged; the smallest that shows a fault; what kinds differ in
``attention``    the kind of attention
``strategies``   which cases: those at every edge, and any by Hypothesis
``cases``        what a case is, and its memory; ``tensors``: the same for torch
``signatures``   how operators are called
``selection``    the kind of operators that select keys
``child``        the process that the operator runs in; ``forms``: what it may return
``oracle``       attention in float64 that can be wrong; by ``switches``, on wrong ``memory``
``faults``       the wrong ways that have names
``verdict``      reports, and what they promise
``diagnosis``    which of them explains results; ``judgement`` and ``tolerances``: what differs
"""

from .cases import Case
from .faults import FAULTS, Fault
from .runner import conform
from .selection import (
    SELECTION_FAULTS,
    SELECTION_SIGNATURES,
    SelectionAnswer,
    SelectionFeatures,
    SelectionSignature,
)
from .signatures import SIGNATURES, Answer, Features, Signature

__all__ = [
    "FAULTS",
    "SELECTION_FAULTS",
    "SELECTION_SIGNATURES",
    "SIGNATURES",
    "Answer",
    "Case",
    "Fault",
    "Features",
    "SelectionAnswer",
    "SelectionFeatures",
    "SelectionSignature",
    "Signature",
    "conform",
]
