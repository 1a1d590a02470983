# SPDX-License-Identifier: Apache-2.0
"""Measured rates, in the form that `cpattn plan` takes."""

from __future__ import annotations

from collections.abc import Mapping


def as_options(rates: Mapping[str, float]) -> str:
    """Rates as options of `cpattn plan`, to give them another time."""
    return " ".join(
        f"--{name.replace('_', '-')} {value:{'.3g' if value < 100 else '.0f'}}"
        for name, value in rates.items()
    )
