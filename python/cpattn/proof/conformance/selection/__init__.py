# SPDX-License-Identifier: Apache-2.0
"""Operators that select keys for sparse attention, tried on scores.

``signatures``   how they are called; ``features``: what calls can say, and what one's own is
``cases``        scores at every edge, and any by Hypothesis
``trials``       what is right: any order, any choice among equal scores
``faults``       the wrong ways that have names
``runner``       cases tried, wrong ones named, and the smallest that shows a fault
"""

from .faults import SELECTION_FAULTS
from .features import SelectionAnswer, SelectionFeatures, SelectionSignature
from .signatures import SELECTION_SIGNATURES

__all__ = [
    "SELECTION_FAULTS",
    "SELECTION_SIGNATURES",
    "SelectionAnswer",
    "SelectionFeatures",
    "SelectionSignature",
]
