# SPDX-License-Identifier: Apache-2.0
"""Exit codes of commands without a verdict and, in the form of shells, of signals."""

CANNOT_TELL = 2  # 1 is "refuted", or a failed check
INTERRUPTED = 130  # 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE
