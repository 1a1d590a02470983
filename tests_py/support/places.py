# SPDX-License-Identifier: Apache-2.0
"""Places of things in the source tree."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
