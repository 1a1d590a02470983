# SPDX-License-Identifier: Apache-2.0
"""Operators for the conformance runner, and how long it may look for the smallest case."""

from __future__ import annotations

# Never reached where the machine has time for the test: what is found does not depend on it.
SECONDS = 300.0
