# SPDX-License-Identifier: Apache-2.0
"""The subcommands `conform`, `lint` and `simulate`, with click."""
