# SPDX-License-Identifier: Apache-2.0
"""Trials of operators that select keys for sparse attention.

``signatures``   calling conventions
``cases``        scores: all edges, and more by Hypothesis; abilities of calls
``rows``         correct results: any order, any choice among equal scores
``faults``       the faults with names
``trials``       results with their scores, for the parent to run and to diagnose
"""

from .cases import SelectionFeatures
from .faults import SELECTION_FAULTS
from .signatures import SELECTION_SIGNATURES, SelectionAnswer, SelectionSignature

__all__ = [
    "SELECTION_FAULTS",
    "SELECTION_SIGNATURES",
    "SelectionAnswer",
    "SelectionFeatures",
    "SelectionSignature",
]
