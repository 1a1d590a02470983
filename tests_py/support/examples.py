# SPDX-License-Identifier: Apache-2.0
"""How many examples a property test tries, in proportion to Hypothesis' profile."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> int:
    """As many as `number` where Hypothesis tries its usual 100: a tenth in the profile "quick"."""
    return max(1, number * settings().max_examples // 100)
