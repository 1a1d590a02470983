# SPDX-License-Identifier: Apache-2.0
"""Limits of waits, by `time.monotonic`: a test that asserts a promise of the library adds `BUSY`; a
test that waits for an event without a promised time waits `PATIENCE`."""

# Seconds that a machine with several times more busy processes than processors adds to a limit, for
# sending a signal, running the handler, unwinding and reporting.
BUSY = 1.0

# After so many seconds an event that has not come will never come, on such a machine, too.
PATIENCE = 120.0
