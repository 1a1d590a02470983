# SPDX-License-Identifier: Apache-2.0
"""`cpattn doctor`, where the package `cpattn-proof` brings the command `cpattn`."""

from __future__ import annotations

import os

import click

from cpattn_terminal import streams
from cpattn_terminal.command_group import CommandGroup

from . import report

CommandGroup.examples["doctor"] = "cpattn doctor"


@click.command(short_help="Say what this machine and environment will do.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output, for programs."
)
def doctor(as_json: bool) -> None:
    """Say what this machine and environment will do with cpattn.

    Instruction set, threads, memory, torch and its guard, engines and their releases, plug-ins,
    and what is missing for what, with the line that installs it; then attention on every
    instruction set of this machine against the oracle. Needs a second or two.

    Lines with ! are warnings, those with x are broken, those with - are worth to know. Exit code 1
    if something is broken: attention differs from the oracle, a variable cannot be used, or torch
    would die.

    \b
    What will happen here:
      cpattn doctor
    The same for a program:
      cpattn doctor --json
    What the portable kernels would do:
      CPATTN_ISA=portable cpattn doctor
    """
    found = list(report.findings())
    if as_json:
        click.echo(report.as_json(found))
    else:
        width = streams.width() or streams.DEFAULT_WIDTH
        colours = streams.is_terminal() and not os.environ.get("NO_COLOR")
        click.echo(report.as_text(found, width, colours=colours))
    if not report.is_well(found):
        click.get_current_context().exit(1)
