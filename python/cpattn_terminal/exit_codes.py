# SPDX-License-Identifier: Apache-2.0
"""Exit codes of commands: of those without a verdict, and, as shells have them, of signals."""

CANNOT_TELL = 2  # 1 is "refuted", or that a check failed
INTERRUPTED = 130  # 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE
