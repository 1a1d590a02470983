# SPDX-License-Identifier: Apache-2.0
"""The command `cpattn`, with the subcommands of the packages that are installed."""

from __future__ import annotations

import click

from .command_group import CommandGroup
from .distributions import VERSION
from .subcommands import SUBCOMMANDS

_DOCUMENTS = """\b
cpattn COMMAND --help has all options, and more examples.
Between machines:
  torchrun --nproc-per-node 2 -m cpattn_lab.check

Documents, in the folder of the sources: docs/index.md, docs/tutorials, docs/command_line.md.
In Python: help(cpattn)."""


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
    epilog=_DOCUMENTS,
)
@click.version_option(VERSION)
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Context-parallel attention for LLM serving on CPU: the new tokens of a batch are shared out
    to ranks, each of which attends from its own to the keys and values of all.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _name, _known in SUBCOMMANDS.items():
    if _known.is_installed():
        commands.add_command(_known.load(_name))
