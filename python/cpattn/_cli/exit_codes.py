# SPDX-License-Identifier: Apache-2.0
"""Exit codes of commands that a signal ended, as shells have them."""

INTERRUPTED = 130  # 128 + SIGINT
CLOSED_PIPE = 141  # 128 + SIGPIPE
