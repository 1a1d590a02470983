# SPDX-License-Identifier: Apache-2.0
"""The subcommands `explain`, `plan` and `replay`, with click."""
