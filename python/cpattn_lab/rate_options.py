# SPDX-License-Identifier: Apache-2.0
"""Measured rates as options of `cpattn plan`."""

from __future__ import annotations

from collections.abc import Mapping


def as_options(rates: Mapping[str, float]) -> str:
    """Return rates as options of `cpattn plan`, for later use."""
    return " ".join(
        f"--{name.replace('_', '-')} {value:{'.3g' if value < 100 else '.0f'}}"
        for name, value in rates.items()
    )
