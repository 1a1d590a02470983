# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, and those of results that are not one case in a line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.harness.figures import Row, bars_of, is_ours

DTYPES = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
MISSED = "*"
Groups = dict[tuple[Any, ...], dict[int, list[Row]]]


def together(cell: str) -> str:
    """A number stays in one line with its unit, on narrow screens, too."""
    return re.sub(r"(\d) (?=(?:[nµm]?s\b|×|%|MiB))", "\\1\N{NO-BREAK SPACE}", cell)


def table(lines: Sequence[Sequence[str]], numbers: int) -> str:
    """In Markdown; the last `numbers` columns are aligned to the right, and none is empty."""
    kept = [i for i in range(len(lines[0])) if any(line[i] for line in lines[1:])]
    rule = ["---" if i < len(lines[0]) - numbers else "--:" for i in range(len(lines[0]))]
    rows = [[together(line[i]) for i in kept] for line in (lines[0], rule, *lines[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def grouped(rows: list[Row]) -> Groups:
    """The rows of each cache, by the number of new tokens."""
    groups: Groups = {}
    for row in rows:
        case = dict(row["case"])
        new = case.pop("new")
        case.pop("threads", None)
        groups.setdefault(tuple(case.values()), {}).setdefault(new, []).append(row)
    return groups


def ours(rows: list[Row]) -> Row | None:
    return next((row for row in rows if is_ours(row) and "median" in row), None)


def ratio(rows: list[Row]) -> float | None:
    """Of the best peer's time to cpattn's."""
    mine = ours(rows)
    peers = [row["median"] for row in rows if "median" in row and not is_ours(row)]
    return min(peers) / mine["median"] if mine and peers else None


def cell(rows: list[Row]) -> str:
    mine = ours(rows)
    if mine is None:
        return ""
    missed = any(not bar["met"] for bar in bars_of(mine))
    return f"{mine['percent_of_peak']:.0f}{MISSED * missed}"


def tables(rows: list[Row]) -> Iterator[str]:
    """For each number of cached tokens the shares of the roofline, and who is nearest."""
    groups = grouped(rows)
    for cached in sorted({key[0] for key in groups}):
        of = {key: group for key, group in groups.items() if key[0] == cached}
        lengths = sorted({new for group in of.values() for new in group})
        lines = [["sequences, heads, cache", *map(str, lengths), "least ratio"]]
        for (_, batch, kv_heads, dim, dtype), group in of.items():
            label = f"{batch}, 32/{kv_heads} × {dim}, {DTYPES.get(dtype, dtype)}"
            ratios = [value for cases in group.values() if (value := ratio(cases)) is not None]
            least = f"{min(ratios):.2f} ×" if ratios else ""
            lines.append([label, *(cell(group.get(new, [])) for new in lengths), least])
        yield f"## {cached:,} cached tokens"
        yield table(lines, len(lengths) + 1)


def extends(rows: list[Row], reason: Callable[[Row], str]) -> Iterator[str]:
    """A row for each cache, a column for each number of new tokens."""
    yield from tables(rows)
    yield from left_out(rows)
    yield from missed(rows, reason)


def short(bar: str) -> str:
    """The name of a bar, for the head of a narrow column."""
    return re.sub("^longer than .*", "longer, %", bar).replace("times as fast as ", "× ")


def all_bars(rows: list[Row]) -> Iterator[str]:
    """Of results whose bars compare with several others: a line for each case, for each job."""
    for part in dict.fromkeys(row["part"] for row in rows):
        judged = [row for row in rows if row["part"] == part and bars_of(row)]
        names = list(dict.fromkeys(bar["name"] for row in judged for bar in bars_of(row)))
        lines = [["cache", *map(short, names)]]
        for row in judged:
            bars = {bar["name"]: bar for bar in bars_of(row)}
            cells = [
                f"{bars[n]['value']:.3g}{MISSED * (not bars[n]['met'])}" if n in bars else ""
                for n in names
            ]
            lines.append([row["case"]["cache"], *cells])
        if judged:
            yield f"Bars of {part}; `{MISSED}` marks a missed one."
            yield table(lines, len(names))


def missed(rows: list[Row], reason: Callable[[Row], str]) -> Iterator[str]:
    """How many bars there are, and how many were missed for which reason."""
    judged = [(row, bar) for row in rows for bar in bars_of(row)]
    if not judged:
        return
    reasons = Counter(reason(row) for row, bar in judged if not bar["met"])
    yield f"{len(judged) - reasons.total()} of {len(judged)} bars met."
    yield "\n".join(f"- {count} missed: {why}" for why, count in reasons.items())


def left_out(rows: list[Row]) -> Iterator[str]:
    large = {tuple(row["case"].values())[:5]: row for row in rows if row["status"] == "too large"}
    if large:
        said = "; ".join(
            f"{batch} × {cached:,}, 32/{kv} × {dim}, {DTYPES.get(dtype, dtype)} ({row['reason']})"
            for (cached, batch, kv, dim, dtype), row in large.items()
        )
        yield f"Left out, because their copies do not fit into memory: {said}."
