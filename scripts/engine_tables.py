# SPDX-License-Identifier: Apache-2.0
"""Tables of bench_vllm.py and bench_sglang_engine.py: steps, and a trace that was served."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from figure_tables import MISSED, table

from bench.harness.figures import Row, bars_of, duration, is_ours


def pairs(rows: list[Row]) -> Iterator[tuple[str, Row, Row]]:
    """Each case with cpattn's row and that of the engine's own attention."""
    for case, group in groupby(rows, key=lambda row: row["case"]):
        ours, theirs = sorted(group, key=is_ours, reverse=True)
        yield case["workload"], ours, theirs


def steps(rows: list[Row], own: str) -> str:
    """What a step took with both, and the bar."""
    lines = [["step", own, "cpattn", "ratio", "bar"]]
    for name, ours, theirs in pairs(rows):
        [bar] = bars_of(ours)
        missed = MISSED * (not bar["met"])
        lines.append(
            [
                name.removesuffix(f", {ours['part']}"),
                duration(theirs["median"]),
                duration(ours["median"]),
                f"{theirs['median'] / ours['median']:.2f} ×{missed}",
                f"≥ {bar['limit']:g} ×",
            ]
        )
    return table(lines, 4)


def served(rows: list[Row], own: str) -> Iterator[str]:
    """A load in a table, with what of it is not as it was recorded."""
    for name, ours, theirs in pairs(rows):
        within = ours["seconds_of_arrivals"]
        arriving = f", within {within:.0f} s" if within else ""
        yield f"{name[0].upper()}{name[1:]}{arriving}:"
        head = ["", "prompt tokens/s", "answer tokens/s", "first token, median", "90 % within"]
        lines = [head]
        for who, row in ((own, theirs), ("cpattn", ours)):
            lines.append(
                [
                    who,
                    f"{row['prompt_tokens_per_second']:,.0f}",
                    f"{row['output_tokens_per_second']:.1f}",
                    duration(row["first_token_median"]),
                    duration(row["first_token_90_percent"]),
                ]
            )
        ratios = [
            ours["prompt_tokens_per_second"] / theirs["prompt_tokens_per_second"],
            ours["output_tokens_per_second"] / theirs["output_tokens_per_second"],
            theirs["first_token_median"] / ours["first_token_median"],
            theirs["first_token_90_percent"] / ours["first_token_90_percent"],
        ]
        lines.append(["cpattn is ahead by", *(f"{ratio:.2f} ×" for ratio in ratios)])
        about = [
            f"random: {ours['random']}",
            f"scaled: all lengths of the trace, divided by {ours['lengths_divided_by']}",
            f"as recorded: order and arrivals of {ours['requests']} requests, {ours['trace']}",
        ]
        lines += [[line, "", "", "", ""] for line in about]
        yield table(lines, 4)
