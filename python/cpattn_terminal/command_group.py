# SPDX-License-Identifier: Apache-2.0
"""Errors of commands: one line on stderr, and an exit code for each cause."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import click

from . import streams
from .distributions import how_to_install
from .exit_codes import CANNOT_TELL, CLOSED_PIPE, INTERRUPTED
from .subcommands import SUBCOMMANDS

#: Object of click's context in a process that runs only the command.
OWN_PROCESS = object()


class CommandGroup(click.Group):
    """Commands with one-line errors, and with an overview that has an example of each."""

    #: An example for each command.
    examples: ClassVar[dict[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List commands in the order of their table, which begins with the library's purpose."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, or name the distribution that includes it."""
        known = SUBCOMMANDS.get(cmd_name)
        if known is not None and cmd_name not in self.commands:
            ctx.fail(
                f"{cmd_name} is a command of {known.distribution}, which is not installed: "
                + how_to_install(known.distribution)
            )
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every command with its purpose and an example, then the missing distributions."""
        width = max(map(len, self.commands))
        with formatter.section("Commands"):
            for name, command in self.commands.items():
                formatter.write_dl([(f"{name:<{width}}", command.get_short_help_str(limit=200))])
                if name in self.examples:
                    formatter.write(f"    $ {self.examples[name]}\n")
        missing: dict[str, list[str]] = {}
        for name, known in SUBCOMMANDS.items():
            if name not in self.commands:
                missing.setdefault(known.distribution, []).append(name)
        for distribution, names in missing.items():
            adds = f"{distribution} adds {', '.join(names)}"
            formatter.write_paragraph()
            formatter.write_text(f"{adds}: {how_to_install(distribution)}.")

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command as click does, but with the exit codes of this module."""
        run = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        return sys.exit(_status_of(run)) if standalone_mode else run()

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; click itself would write an extra line at Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            name = " ".join(filter(None, ("cpattn", ctx.invoked_subcommand)))
            raise _Interrupted(f"{name}: interrupted, all processes ended") from None


def _status_of(run: Callable[[], Any]) -> int:
    """Return the exit code of a command, after its line on stderr if it has one."""
    try:
        status = _outcome(run)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        streams.abandon(sys.stdout)
        return CLOSED_PIPE
    except OSError as error:
        streams.abandon(sys.stdout)
        what = error.filename or "standard output"
        return _said(f"Error: {what}: {error.strerror or error}", 1)


def _outcome(run: Callable[[], Any]) -> int:
    try:
        status = run()
        return status if isinstance(status, int) else 0
    except _Interrupted as error:
        return _said(error.message, INTERRUPTED)
    except click.exceptions.Abort:  # Ctrl-C before the command began
        return _said("cpattn: interrupted", INTERRUPTED)
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
            return _said(message, error.exit_code)
        return _said(f"Error: {' '.join(message.splitlines())}", error.exit_code)
    except MemoryError as error:
        return _said(f"Error: out of memory{f': {error}' if str(error) else ''}", CANNOT_TELL)


class _Interrupted(click.ClickException):
    """Ctrl-C."""


def _said(line: str, status: int) -> int:
    """Print the line if possible, and return the status."""
    try:
        click.echo(line, err=True)
    except OSError:
        streams.abandon(sys.stderr)
    return status


@contextmanager
def refusals_by_option(**names: str) -> Iterator[None]:
    """Turn the ValueError of a function into an error of the command.

    The error names function and argument, but a user of the command line knows the options. `names`
    maps arguments to options with other names.
    """
    try:
        yield
    except ValueError as error:
        params = click.get_current_context().command.params
        options = {param.name or "": max(param.opts, key=len) for param in params} | names
        raise click.UsageError(_by_option(str(error), options)) from None


def _by_option(message: str, options: dict[str, str]) -> str:
    """Return ``Rates: call_us must be ...`` as ``--call-us must be ...``."""
    text = re.sub(r"^\w+: ", "", message)  # drop the function

    def option(match: re.Match[str]) -> str:
        return options.get(match[0], match[0])

    # Names without an underscore also occur as words of sentences.
    return re.sub(r"(?<![-\w])(?:[a-z]+(?:_[a-z]+)+|[a-z]+(?= must ))", option, text)
