# SPDX-License-Identifier: Apache-2.0
"""Number of examples of a property test, in proportion to Hypothesis' profile."""

from hypothesis import settings


def examples(number: int) -> int:
    """Scale `number`, for the usual 100 of Hypothesis: to a half, or a tenth in profile "quick"."""
    return max(1, number * settings().max_examples // 100)
