# SPDX-License-Identifier: Apache-2.0
"""Context-parallel metadata and plans: cpattn against the engines' Python code.

    python bench/bench_metadata.py [--quick] [--only TEXT]

Results are checked before anything is timed; implementations run in turns, in this process.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.harness import program


def main() -> int:
    arguments = program.parse_arguments(__doc__)
    chosen = arguments.quick, arguments.only
    compared = program.comparisons("bench.context_parallel", ["metadata", "plans"], *chosen)
    return program.measure("metadata", arguments, compared)


if __name__ == "__main__":
    raise SystemExit(main())
