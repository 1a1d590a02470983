# SPDX-License-Identifier: Apache-2.0
"""Trial of an operator, for attention or key selection, on many batches; names its faults.

``runner``       `conform`, and the report
``trials``       runs and judges cases; finds the smallest one with a fault
``attention``    trials of attention
``strategies``   choice of cases: all edges, and more by Hypothesis
``cases``        a case and its memory; ``tensors``: as torch tensors
``signatures``   calling conventions of operators
``selection``    trials of operators that select keys
``child``        process that runs the operator; ``forms``: checks of what it returns
``oracle``       float64 attention with deliberate faults, by ``switches`` and wrong ``memory``
``faults``       the faults with names
``verdict``      reports, and the extent of their promise
``diagnosis``    finds the fault that explains results; ``judgement``, ``tolerances``: differences
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
