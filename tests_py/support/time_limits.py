# SPDX-License-Identifier: Apache-2.0
"""Limits of waits, by `time.monotonic`: a test that asserts a promise of the library adds `BUSY`;
one that waits for what should happen, without a promise about when, waits `PATIENCE`."""

# What a machine with several times more busy processes than processors adds to a limit: to send a
# signal, to run the handler, to unwind and to say so.
BUSY = 1.0

# After this many seconds what has not happened never will, on such a machine too.
PATIENCE = 120.0
