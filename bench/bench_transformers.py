# SPDX-License-Identifier: Apache-2.0
"""A model of transformers with 0.5 billion random weights: its attention by cpattn against sdpa.

    python bench/bench_transformers.py [--quick] [--only TEXT] [--parts PART ...]

Whole models, the attention of one layer alone with its arguments in the model, and the functions of
the folder for Hugging Face's `kernels`. Results are checked before anything is timed;
implementations run in turns, in this process, on the same threads and weights. Needs transformers,
`pip install transformers`; 5 minutes on two cores.
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

PARTS = ("prefill", "paged", "latents", "hub_kernel")


def main() -> int:
    arguments = program.parse_arguments(__doc__, budget=2, parts=PARTS)
    if find_spec("transformers") is None:
        print("bench_transformers.py: skipped, transformers is not installed")
        return 0
    parts, quick, only = arguments.parts, arguments.quick, arguments.only
    compared = program.comparisons("bench.transformers", parts, quick, only)
    whole = {*parts} == {*PARTS}
    return program.measure("transformers", arguments, compared, whole=whole)


if __name__ == "__main__":
    raise SystemExit(main())
