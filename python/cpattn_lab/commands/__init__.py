# SPDX-License-Identifier: Apache-2.0
"""Subcommands `explain`, `plan` and `replay`, declared with click."""
