# SPDX-License-Identifier: Apache-2.0
"""Operators that select keys for sparse attention, tried on scores.

``signatures``   how they are called
``cases``        scores at every edge, and any by Hypothesis; what calls can say
``rows``         what is right: any order, any choice among equal scores
``faults``       the wrong ways that have names
``trials``       results beside scores, for the parent to run and to diagnose
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
