# SPDX-License-Identifier: Apache-2.0
"""The common part of the benchmarks' command lines; standard library only."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with ``--quick``, which every benchmark has; `quick` is its help."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    return made


def add_trace(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "--trace",
        type=Path,
        default=os.environ.get("CPATTN_TRACE"),
        help="a request trace, .jsonl or .jsonl.gz",
    )
