# SPDX-License-Identifier: Apache-2.0
"""Declarations that several commands share: options with a default, failures, files to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cpattn_terminal.options import Integer, OutputPath, writing

STRATEGIES = ("zigzag", "interleave", "contiguous")
DTYPES = ("auto", "float32", "bfloat16", "float16")

SIZE = Integer()
MODEL_SIZE = Integer(1, 1 << 16)
HEAD_DIM = Integer(1, 576)
REQUESTS = Integer(1, 1_000_000)
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = OutputPath()


def option(names: str, default: Any, text: str, kind: Any = None) -> Callable[[Any], Any]:
    """Make an option whose help shows its default; `names` are separated by blanks."""
    return click.option(*names.split(), default=default, help=text, type=kind, show_default=True)


def of_model(names: str, default: str, text: str, kind: Any = SIZE) -> Callable[[Any], Any]:
    """Make an option for which a kind of model has its own default, or which it lacks."""
    return click.option(*names.split(), help=text, type=kind, show_default=default)


def is_given(name: str) -> bool:
    """Return whether the user gave an option that has a default."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT


@contextmanager
def failures() -> Iterator[None]:
    """Turn failures at run time into one line: a process that died, a missing engine."""
    from ..processes.workers import WorkerError

    try:
        yield
    except ModuleNotFoundError:
        raise  # `main` says how to install it
    except WorkerError as error:
        raise click.ClickException(f"{error}; all processes ended") from None
    except (RuntimeError, ImportError) as error:
        raise click.ClickException(" ".join(str(error).split())) from None


def write_file(what: str, path: Path, write: Callable[[], None]) -> None:
    """Write a file and say so; a failure is one line."""
    with writing(path):
        write()
    click.echo(f"{what} written to {path}")
