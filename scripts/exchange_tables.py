# SPDX-License-Identifier: Apache-2.0
"""Tables of bench_exchanges.py: ways to exchange over links, and what the model chooses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from figure_tables import table

from bench.harness.figures import Row

IN_TURNS = ", in turns"
#: Ways among which the model chooses: those over sharded pools.
CHOICES = ("gather", "ring", "pass_q", "all_to_all")
#: Ways that overlap attention and exchange, and the bar of their time over the longer of both.
OVERLAPPED = ("replicated", "gather", "gather, one layer ahead", "ring", "pass_q", "all_to_all")
BAR = 1.12
#: Of the fastest way: a choice is right within this, as runs differ by as much.
SAME = 1.02


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def choice(rows: list[Row]) -> Row:
    return min(
        (row for row in rows if row["implementation"] in CHOICES), key=lambda row: row["predicted"]
    )


def cell(row: Row | None, rows: list[Row]) -> str:
    """A time, how it compares with the longer of attention and link, and marks."""
    if row is None:
        return ""
    text = milliseconds(row["median"])
    if row["implementation"] in CHOICES and row["median"] == min(
        other["median"] for other in rows if other["implementation"] in CHOICES
    ):
        text = f"**{text}**"
    if row is choice(rows):
        text += "†"
    return f"{text} ({row['of_bound']:.2f})" if "of_bound" in row else text


def by_case(rows: list[Row]) -> dict[str, list[Row]]:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(str(row["case"]), []).append(row)
    return cases


def exchanges(rows: list[Row]) -> Iterator[str]:
    """A table for each number of ranks and each shape, with a column for each link."""

    def key(row: Row) -> Any:
        return row["case"]["ranks"], row["case"]["shape"]

    order = {key(row): i for i, row in reversed(list(enumerate(rows)))}
    for (ranks, shape), group in groupby(sorted(rows, key=lambda row: order[key(row)]), key=key):
        of = list(group)
        links = list(dict.fromkeys(row["case"]["link"] for row in of))
        compute = [
            milliseconds(next(row for row in of if row["case"]["link"] == link)["compute"])
            for link in links
        ]
        yield f"## {ranks} ranks, {shape}"
        lines = [["attention alone", *compute]]
        for name in dict.fromkeys(row["implementation"] for row in of):
            line = [name]
            for link in links:
                cells = [row for row in of if row["case"]["link"] == link]
                mine = [row for row in cells if row["implementation"] == name]
                line.append(cell(mine[0] if mine else None, cells))
            lines.append(line)
        yield table([["ms", *links], *lines], len(links))
    yield "## What holds"
    yield "\n".join(f"- {line}" for line in verdicts(rows))


def how_good(choices: list[tuple[list[Row], str]]) -> str:
    """How often what was chosen of the rows of a case is the fastest."""
    right, worst = 0, 1.0
    for of, name in choices:
        times = {row["implementation"]: row["median"] for row in of}
        best = min(times[name] for name in CHOICES)
        right += times[name] <= SAME * best
        worst = max(worst, times[name] / best)
    return (
        f"the fastest, within {100 * (SAME - 1):.0f} %, in {right} of {len(choices)} cases; in the "
        f"worst it takes {worst:.2f} × the fastest."
    )


def verdicts(rows: list[Row]) -> Iterator[str]:
    """Whether the bars are met, over all cases."""
    of_bound = {
        name: [row["of_bound"] for row in rows if row["implementation"] == name]
        for name in OVERLAPPED
    }
    within = [
        f"{name} {sum(times <= BAR for times in of_way)} of {len(of_way)} (at most "
        f"{max(of_way):.2f} ×)"
        for name, of_way in of_bound.items()
        if of_way
    ]
    yield f"Within {BAR} × the longer of attention and link: {'; '.join(within)}."
    cases = by_case(rows).values()
    gains = []
    ahead, against = 0, 0
    for of in cases:
        times = {row["implementation"]: row["median"] for row in of}
        gains += [
            times[name + IN_TURNS] / times[name] for name in OVERLAPPED if name + IN_TURNS in times
        ]
        peers = [seconds for name, seconds in times.items() if name.startswith("ring-flash-attn")]
        against += bool(peers)
        ours = [times[name] for name in OVERLAPPED if name in times]
        ahead += bool(peers) and min(ours) < min(peers)
    yield (
        "One call against `write_kv` and `attend` in turns: "
        f"{min(gains):.2f} to {max(gains):.2f} × as fast."
    )
    model = [(of, choice(of)["implementation"]) for of in cases]
    yield f"The model's choice among exchanges of sharded pools (†) is {how_good(model)}"
    if auto := [(of, of[0]["auto"]) for of in cases if "auto" in of[0]]:
        who = 'The choice of `exchange="auto"`, which knows bytes but no rates, is'
        yield f"{who} {how_good(auto)}"
    if against:
        yield f"Ahead of both methods of ring-flash-attn in {ahead} of {against} cases."
