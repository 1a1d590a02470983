# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/how_to/transformers_models.md: every kind of text model, tried.

python -m support.transformers.family_table               # `make families`, some minutes
python -m support.transformers.family_table llama bloom   # prints those alone
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from rich.progress import track

from .families import BATCHES, PARTS, Calls, Outcome, text_models, try_model

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "transformers_models.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"
COLUMNS = (*PARTS, BATCHES)
Tried = Mapping[str, Mapping[str, Outcome] | str]


def try_all(names: list[str]) -> dict[str, Mapping[str, Outcome] | str]:
    calls = Calls()
    return {
        name: try_model(name, calls)
        for name in track(names, "Models", disable=not sys.stderr.isatty())
    }


def reasons(outcomes: Mapping[str, Outcome]) -> list[str]:
    """What stands in a row behind its words, each reason once."""
    said: dict[str, list[str]] = {}
    for part, outcome in outcomes.items():
        if outcome.word not in ("yes", "own", "-"):
            said.setdefault(outcome.reason, []).append(part)
    return [reason.replace("|", "\\|") for reason in said if reason]


def table(tried: Tried) -> str:
    lines = [f"| model | {' | '.join(COLUMNS)} | |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, outcomes in tried.items():
        if isinstance(outcomes, str):
            continue
        words = " | ".join(outcomes[part].word for part in COLUMNS)
        lines.append(f"| {name} | {words} | {'; '.join(reasons(outcomes))} |")
    return "\n".join(lines) + "\n"


def summary(tried: Tried) -> str:
    built = [outcomes for outcomes in tried.values() if not isinstance(outcomes, str)]
    words = [{outcome.word for outcome in row.values()} for row in built]
    asking = [row for row in words if "yes" in row]
    right = sum(row <= {"yes", "own", "-"} for row in asking)
    return (
        f"transformers {transformers.__version__}: {len(tried)} types, {len(built)} of them built. "
        f"{len(asking)} get attention from cpattn, {right} of these wherever eager attention "
        f"does it at all; {sum('refused' in row for row in words)} are refused.\n"
    )


def not_built(tried: Tried) -> str:
    names = [name for name, outcomes in tried.items() if isinstance(outcomes, str)]
    return f"\nNot built small by the script: {', '.join(names)}.\n" if names else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="types of models; default: all")
    names = parser.parse_args().models
    torch.set_num_threads(1)
    tried = try_all(names or text_models())
    text = f"{summary(tried)}\n{table(tried)}{not_built(tried)}"
    if names:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + text + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
