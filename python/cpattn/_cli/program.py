# SPDX-License-Identifier: Apache-2.0
"""The command with all that it can do: modules of commands add them to the group when imported."""

from . import conform_command, lint_command, plan_command, replay_command, simulate_command
from .commands import commands

__all__ = [
    "commands",
    "conform_command",
    "lint_command",
    "plan_command",
    "replay_command",
    "simulate_command",
]

#: What shows first what the library is about comes first.
_ORDER = ("explain", "plan", "replay", "doctor", "conform", "lint", "simulate")
commands.commands = dict(sorted(commands.commands.items(), key=lambda item: _ORDER.index(item[0])))
