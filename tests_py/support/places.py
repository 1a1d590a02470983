# SPDX-License-Identifier: Apache-2.0
"""Places of things in the source tree."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
