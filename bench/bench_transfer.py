# SPDX-License-Identifier: Apache-2.0
"""KV transfer: planning against NumPy, writes into pools against torch, bytes over a real engine.

    python bench/bench_transfer.py [--quick] [--only TEXT]

Results are checked before anything is timed; implementations run in turns, in this process, on
the same threads and tensors.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.harness import program

PARTS = ("planning", "scatter", "local", "engine")
ABSENT = "not installed"

comparisons = partial(program.comparisons, "bench.transfer", PARTS)


def main() -> int:
    arguments = program.parse_arguments(__doc__)
    compared = comparisons(arguments.quick, arguments.only)
    return program.measure("transfer", arguments, compared, excused=[ABSENT])


if __name__ == "__main__":
    raise SystemExit(main())
