# SPDX-License-Identifier: Apache-2.0
"""Masks of sequences, a bool for each query and key, as arguments of attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def dense(masks: Sequence[np.ndarray]) -> np.ndarray:
    """`custom_mask`: the rows of all sequences."""
    return np.concatenate([mask.ravel() for mask in masks])


def packed(masks: Sequence[np.ndarray]) -> np.ndarray:
    """`packed_custom_mask`: bits, every sequence from a byte of its own."""
    return np.concatenate([np.packbits(mask, bitorder="little") for mask in masks])
