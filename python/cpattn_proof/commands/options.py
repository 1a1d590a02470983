# SPDX-License-Identifier: Apache-2.0
"""Options of all tools that judge."""

from __future__ import annotations

from typing import Any

import click

from cpattn_terminal.options import shown


class Requirements(click.ParamType):  # type: ignore[type-arg]
    """Ids of invariants that a tool has to decide, see `cpattn_proof.require`."""

    name = "ID,ID,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        from ..invariants import INVARIANTS

        if isinstance(value, str):
            value = tuple(value.split(","))
        unknown = next((one for one in value if one not in INVARIANTS), None)
        if unknown is not None:
            self.fail(f"must be of {', '.join(INVARIANTS)}, got {shown(unknown)}", param, ctx)
        return value


#: The same option of every command that judges; its value is a tuple, empty if not given.
require_option = click.option(
    "--require",
    "required",
    type=Requirements(),
    default=(),
    help="Invariants that must be checked, such as COV,LSE; exit code 2 if one is not.",
)
