# SPDX-License-Identifier: Apache-2.0
"""The subcommands `conform`, `lint`, `simulate` and `zoo`, with click."""
