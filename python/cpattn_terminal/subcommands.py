# SPDX-License-Identifier: Apache-2.0
"""Subcommands of `cpattn`, with module and distribution of each."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import click


class Subcommand(NamedTuple):
    """Module with a click command of the subcommand's name."""

    module: str
    distribution: str

    def is_installed(self) -> bool:
        """Tell whether the package of the module can be imported."""
        return find_spec(self.module.partition(".")[0]) is not None

    def load(self, name: str) -> click.Command:
        """Import the module, and return its command."""
        command = getattr(import_module(self.module), name)
        assert isinstance(command, click.Command), name
        return command


#: The subcommands that best show the library's purpose come first.
SUBCOMMANDS = {
    "explain": Subcommand("cpattn_lab.commands.explain", "cpattn-lab"),
    "plan": Subcommand("cpattn_lab.commands.plan", "cpattn-lab"),
    "replay": Subcommand("cpattn_lab.commands.replay", "cpattn-lab"),
    "doctor": Subcommand("cpattn.doctor.command", "cpattn"),
    "bind": Subcommand("cpattn.doctor.bind_command", "cpattn"),
    "conform": Subcommand("cpattn_proof.commands.conform", "cpattn-proof"),
    "lint": Subcommand("cpattn_proof.commands.lint", "cpattn-proof"),
    "simulate": Subcommand("cpattn_proof.commands.simulate", "cpattn-proof"),
    "zoo": Subcommand("cpattn_proof.commands.zoo", "cpattn-proof"),
}
