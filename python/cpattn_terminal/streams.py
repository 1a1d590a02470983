# SPDX-License-Identifier: Apache-2.0
"""Standard streams of a command: closed ones, encodings without × and µ, widths, full disks."""

from __future__ import annotations

import codecs
import os
import shutil
import sys
from contextlib import suppress
from typing import TextIO

DEFAULT_WIDTH = 80
_PLAIN = {
    "×": "x",
    "µ": "u",
    "·": "-",
    "─": "-",
    "━": "-",
    "…": "...",
    "’": "'",
}


def prepare() -> None:
    """Make the standard streams usable, however the process was started.

    A closed stream gets an unusable descriptor: else the next opened file or pipe would take its
    number, and receive output for the terminal. Characters that a stream's encoding lacks are
    written in plain letters.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # Opened in the wrong direction: reading and writing fail, as on a closed descriptor.
            opened = os.open(os.devnull, os.O_WRONLY if mode == "r" else os.O_RDONLY)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error("cpattn-plain", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="cpattn-plain")


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Return plain text for characters that an encoding lacks; ``\\u2248`` as a last resort."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    escaped = (_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in text)
    return "".join(escaped), error.end


def abandon(stream: TextIO | None) -> None:
    """Drop the buffered output of a stream, which could not be written and would be retried."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)
        stream.flush()  # type: ignore[union-attr]


def is_terminal() -> bool:
    """Tell whether standard output is a terminal with colours."""
    with suppress(OSError, ValueError, AttributeError):
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return False


def width() -> int | None:
    """Return the columns of standard output, by `COLUMNS` or the terminal; else None."""
    with suppress(OSError, ValueError, AttributeError):
        given = int(os.environ.get("COLUMNS", "0"))
        if given > 0:
            return given
    with suppress(OSError, ValueError, AttributeError):
        if sys.stdout.isatty():
            return shutil.get_terminal_size().columns or DEFAULT_WIDTH
    return None
