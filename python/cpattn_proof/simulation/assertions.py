# SPDX-License-Identifier: Apache-2.0
"""Failed assertions of a program on its own results."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path

import torch

from ..findings import Finding
from .calls import PACKAGE, Site, is_program

_MOST_LINES = 12  # most lines of the message of an assertion
_CHECKS = (
    str(Path(torch.testing.__file__).parent),
    *(str(Path(sysconfig.get_path("stdlib")) / name) for name in ("unittest", "contextlib.py")),
)
_LIBRARIES = (PACKAGE, *{sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


def finding_of(error: BaseException, rank: int, text: str) -> Finding | None:
    """Return the finding of the program's own AssertionError; None for other errors.

    Assertions of libraries concern their arguments, and those of torch its state.

    Parameters
    ----------
    error : BaseException
        Error of the rank.
    rank : int
        Number of the rank.
    text : str
        Text of the error.
    """
    if not isinstance(error, AssertionError):
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _checks(frame)]
    if not frames or not _is_own(frames[-1].filename):
        return None
    frame = frames[-1]
    site = Site(frame.filename, frame.lineno or 0, frame.name)
    line = linecache.getline(site.file, site.line).strip()
    first, *more = text.strip().splitlines()[:_MOST_LINES] or [line]
    return Finding(
        "RES",
        f"rank {rank} asserts what does not hold: {first}",
        where=str(site),
        ranks=(rank,),
        picture="\n".join([f"rank {rank}  {site}", line, *more]).rstrip(),
        kind="assertion",
        details={"rank": rank, "file": site.file, "line": site.line, "message": text},
    )


def _checks(frame: traceback.FrameSummary) -> bool:
    """Tell whether a frame belongs to functions that assert for others."""
    file = frame.filename
    return file.startswith(_CHECKS) or "/numpy/testing/" in file


def _is_own(file: str) -> bool:
    return is_program(file) and not file.startswith(_LIBRARIES)
