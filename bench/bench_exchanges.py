# SPDX-License-Identifier: Apache-2.0
"""Every exchange of ranks on two hosts with a limited link, against the model's prediction.

    python bench/bench_exchanges.py [--quick] [--gbps 0.5,1,2.5] [--ranks 2,4]

Hosts are network namespaces, the link between them is limited by tc; that needs root, or the right
to make namespaces. Ranks have one thread each and are pinned to CPUs in turn. A layer is timed
from new keys and values on each rank to attention of its rows, as the slowest rank sees it; results
are checked before. `compute` is attention alone on all ranks at once, `transfer` the time of the
link for the bytes of the exchange at the rate measured beside it. "one layer ahead" is a layer of
four by `ContextParallel.prefetch`, including the first layer's cached keys.
``CPATTN_RING_FLASH_ATTN`` names a folder with the wheel of ring-flash-attn, which then runs on the
same kernels. Three rounds, fewer where one takes over a minute; a quarter of an hour on AMX, three
on two cores of Zen 4.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).parents[1])

from rich.table import Table

from bench.context_parallel.exchanges import (
    AHEAD,
    WAYS,
    Settings,
    Shape,
    link_bytes_per_second,
    medians,
    predicted,
    rates_of,
    run_world,
)
from bench.harness import command, two_hosts
from bench.harness.environment import environment, results_file
from bench.harness.report import console
from cpattn import torch_guard
from cpattn_lab.cost_model import Rates
from cpattn_lab.cost_model.calibration import calibrate
from cpattn_lab.processes.hosts import Hosts

SHAPES = (Shape(8192, 0), Shape(8192, 32768), Shape(512, 32768))
QUICK = (Shape(256, 0), Shape(64, 1024))


def rows_of(
    answer: dict[str, Any], shape: Shape, size: int, gbps: float, settings: Settings, rates: Rates
) -> list[dict[str, Any]]:
    """Measured and predicted times of a shape, a row for each way."""
    times = medians(answer, shape)
    rate = link_bytes_per_second(answer, size)
    compute = times.pop("compute")
    case = {"ranks": size, "link": f"{gbps:g} Gbit/s", "shape": shape.name}
    rows = []
    for name, seconds in times.items():
        of = answer["shapes"][shape.name][name]
        row: dict[str, Any] = {
            "case": case, "implementation": name, "median": seconds, "samples": len(of),
            "spread": max(of) - min(of), "compute": compute, "link_bytes_per_second": rate,
            "auto": answer["auto"][shape.name], "rates": dataclasses.asdict(rates),
        }  # fmt: skip
        if way := next((way for way in (*WAYS, AHEAD) if way.name == name), None):
            cpus = len(os.sched_getaffinity(0))
            ours = rates_of(rates, way, size, cpus, rate)
            row["predicted"], row["transfer"] = predicted(shape, way, size, settings, ours)
            row["of_bound"] = seconds / max(compute, row["transfer"])
        rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    case = rows[0]["case"]
    table = Table(title=f"{case['ranks']} ranks, {case['link']}, {case['shape']}")
    for name in ("", "layer", "spread", "compute", "transfer", "of the longer", "predicted", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    best = min(row["median"] for row in rows)
    chosen = min(of_shards(rows), key=lambda row: row["predicted"])
    for row in rows:
        cells = [row["implementation"], ms(row["median"]), ms(row["spread"]), ms(row["compute"])]
        more = ["", "", ""]
        if "predicted" in row:
            more = [ms(row["transfer"]), f"{row['of_bound']:.2f} ×", ms(row["predicted"])]
        notes = ["fastest"] * (row["median"] == best) + ["model's choice"] * (row is chosen)
        table.add_row(*cells, *more, ", ".join(notes))
    console().print(table)


def of_shards(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ways among which the model chooses: over sharded pools, in one call each."""
    names = {way.name for way in WAYS if way.sharded and way.overlapped}
    return [row for row in rows if row["implementation"] in names]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def print_choices(rows: list[dict[str, Any]]) -> None:
    """How often the model is right about sharded pools, over all cases."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in of_shards(rows):
        cases.setdefault(str(row["case"]), []).append(row)
    choosers: dict[str, Callable[[list[dict[str, Any]]], dict[str, Any]]] = {
        "the model's choice": lambda of: min(of, key=lambda row: row["predicted"]),
        "auto": lambda of: next(row for row in of if row["implementation"] == row["auto"]),
    }
    for who, choose in choosers.items():
        worst, right = 1.0, 0
        for of in cases.values():
            best, chosen = min(row["median"] for row in of), choose(of)["median"]
            right += chosen <= 1.02 * best
            worst = max(worst, chosen / best)
        console().print(
            f"of sharded pools {who} is the fastest, within 2 %, in {right} of {len(cases)} "
            f"cases, and at most {worst:.2f} × the fastest"
        )


def main() -> int:
    parser = command.parser(__doc__, quick="small shapes, 2 ranks, one link; not kept")
    parser.add_argument("--gbps", default="0.5,1,2.5", help="rates of the link, with commas")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, even, with commas")
    arguments = parser.parse_args()
    if reason := two_hosts.why_not(link_gbps=1):
        print(f"bench_exchanges: {reason}, so nothing is measured")
        return 0
    links = [1.0] if arguments.quick else [float(gbps) for gbps in arguments.gbps.split(",")]
    sizes = [2] if arguments.quick else [int(size) for size in arguments.ranks.split(",")]
    settings = Settings(
        QUICK if arguments.quick else SHAPES,
        rounds=1 if arguments.quick else 3,
        ring_flash_attn=os.environ.get("CPATTN_RING_FLASH_ATTN", ""),
    )
    rates = calibrate(settings.layer, threads=1)
    about = {"bench": "exchanges"} | environment()
    rows: list[dict[str, Any]] = []
    for size in sizes:
        for gbps in links:
            with Hosts(2, link_gbps=gbps) as hosts:
                answer = run_world(hosts, size, settings)
            for shape in settings.shapes:
                found = rows_of(answer, shape, size, gbps, settings, rates)
                print_rows(found)
                rows += [row | about for row in found]
    print_choices(rows)
    if not arguments.quick:
        results_file("exchanges", about).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    if message := torch_guard.prepare():
        print(message)
    raise SystemExit(main())
