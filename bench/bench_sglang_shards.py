# SPDX-License-Identifier: Apache-2.0
"""Plans of sglang's striped KV pools: its own functions, and the plug-in called in their place.

    python bench/bench_sglang_shards.py [--quick]

Needs sglang 0.5.23 (docs/how_to/sglang.md). Prints figures, keeps none.
"""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from cpattn import torch_guard

if message := torch_guard.prepare():
    print(message)
import torch
from rich.table import Table

from bench.harness import command
from bench.harness.report import console


def main() -> int:
    parser = command.parser(__doc__, quick="a few calls")
    rounds = 2 if parser.parse_args().quick else 100
    if find_spec("sglang") is None:
        print("bench_sglang_shards: sglang is not installed, there is nothing to compare with")
        return 0
    from bench.context_parallel import sglang_shards

    torch.set_num_threads(1)
    table = Table(title=f"µs a call, medians of {rounds} samples: sglang, cpattn")
    table.add_column("requests, new tokens of each")
    for name in sglang_shards.PLANS:
        table.add_column(name)
    gc.disable()
    for batch in sglang_shards.BATCHES:
        medians = sglang_shards.measure(batch, rounds)
        cells = (
            f"{medians['sglang'][name]:.0f}, {medians['cpattn'][name]:.0f}"
            for name in medians["cpattn"]
        )
        table.add_row(f"{batch.num_requests}, {batch.num_new}", *cells)
    console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
