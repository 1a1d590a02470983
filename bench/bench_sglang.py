# SPDX-License-Identifier: Apache-2.0
"""Metadata of one forward pass of sglang: its own builders, and the plug-in called in their place.

    python bench/bench_sglang.py [--quick] [--only TEXT]

Needs sglang 0.5.23 (docs/how_to/sglang.md); without it there is no peer.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)

from bench.harness import program


def main() -> int:
    arguments = program.parse_arguments(__doc__)
    if find_spec("sglang") is None:
        print("bench_sglang: sglang is not installed, there is nothing to compare with")
        return 0
    chosen = arguments.quick, arguments.only
    compared = program.comparisons("bench.context_parallel", ["sglang_objects"], *chosen)
    return program.measure("sglang", arguments, compared)


if __name__ == "__main__":
    raise SystemExit(main())
