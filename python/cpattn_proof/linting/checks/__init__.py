# SPDX-License-Identifier: Apache-2.0
"""Checks of a plan, by invariant: ``check`` says what a check is, the others have some."""

from . import (
    addresses,
    balance,
    collectives,
    coverage,
    heads,
    layouts,
    lengths,
    merging,
    ownership,
    padding,
    selection,
    slots,
    transfers,
    units,
)
from .check import Check

MODULES = (
    ownership,
    heads,
    slots,
    coverage,
    units,
    lengths,
    merging,
    collectives,
    transfers,
    layouts,
    selection,
    addresses,
    padding,
    balance,
)
CHECKS: tuple[Check, ...] = tuple(check for module in MODULES for check in module.CHECKS)

__all__ = ["CHECKS", "Check"]
