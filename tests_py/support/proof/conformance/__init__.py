# SPDX-License-Identifier: Apache-2.0
"""Operators for the conformance runner, and its settings for edge cases only."""

# Every edge case is tried and none is made smaller, so findings do not depend on the clock.
AT_EDGES = {"examples": 0, "seconds": 0.001}
SECONDS_TO_SHRINK = 300.0  # never reached if the machine has time for the test
