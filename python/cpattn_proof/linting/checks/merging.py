# SPDX-License-Identifier: Apache-2.0
"""LSE: partial results have one base, -inf without keys, sinks once, and no part is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...findings import Finding
from ..intervals import Ints, first_of
from ..model import Absent, Plan, Undecided
from .check import Check, finding, many


def _merges(plan: Plan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    merges = plan.document.get("merges")
    if not merges:
        raise Absent("the document has no merges")
    for number, merge in enumerate(merges):
        where = f"merge {number}"
        yield (f"{where}, request {merge['request']}" if "request" in merge else where), merge


def _picture(merge: Mapping[str, Any]) -> str:
    """Describe the first parts of a merge, as far as the document tells."""
    lines = []
    for part in merge["parts"][:8]:
        said = [f"base {part['base']}"] if "base" in part else []
        said += ["with sinks" if part["sinks"] else "without sinks"] if "sinks" in part else []
        said += [f"LSE of empty rows {part['empty']}"] if "empty" in part else []
        lines.append(f"rank {part['rank']}  {', '.join(said)}")
    rest = len(merge["parts"]) - len(lines)
    lines += [f"({rest} more parts)"] if rest else []
    return "\n".join([*lines, *([f"merged with base {merge['base']}"] if "base" in merge else [])])


def bases(plan: Plan) -> list[Finding]:
    """Check that parts have the base that the merge uses."""
    decided = False
    for where, merge in _merges(plan):
        wanted = merge.get("base", next((p["base"] for p in merge["parts"] if "base" in p), None))
        for part in merge["parts"]:
            decided |= "base" in part
            if part.get("base", wanted) != wanted:
                return finding(
                    "lse-base", f"rank {part['rank']} gives an LSE of base {part['base']}, it is "
                    f"merged with base {wanted}", where, [part["rank"]], _picture(merge),
                    base=part["base"], expected=wanted,
                )  # fmt: skip
    if not decided:
        raise Absent("no part of a merge has a base")
    return []


def sinks(plan: Plan) -> list[Finding]:
    """Check that one part counts the sinks if the model has them, and no part if it has none."""
    decided = False
    wanted = int(plan.document.get("attention", {}).get("sinks", False))
    for where, merge in _merges(plan):
        if not all("sinks" in part for part in merge["parts"]):
            continue
        decided = True
        ranks = [part["rank"] for part in merge["parts"] if part["sinks"]]
        if len(ranks) != wanted:
            return finding(
                "lse-sink", f"{many(len(ranks), 'part')} counted the sinks, not {wanted}", where,
                ranks or [part["rank"] for part in merge["parts"]], _picture(merge),
                times=len(ranks), expected=wanted,
            )  # fmt: skip
    if not decided:
        raise Absent("no merge says which parts counted sinks")
    return []


def empty(plan: Plan) -> list[Finding]:
    """Check that rows without keys have weight zero, alone and among themselves."""
    decided = False
    for where, merge in _merges(plan):
        decided |= "both_empty" in merge
        for part in merge["parts"]:
            decided |= "empty" in part
            if part.get("empty", "-inf") != "-inf":
                return finding(
                    "lse-empty", f"rank {part['rank']} gives rows without keys an LSE that is "
                    f"{part['empty']}, not -inf", where, [part["rank"]], _picture(merge),
                    empty=part["empty"],
                )  # fmt: skip
        if merge.get("both_empty") == "nan":
            return finding(
                "lse-empty", "two parts without keys are merged to NaN, not to zeros", where,
                [part["rank"] for part in merge["parts"]], _picture(merge), both_empty="nan",
            )  # fmt: skip
    if not decided:
        raise Absent("no part says what rows without keys give")
    return []


MOST_MEETINGS = 10_000_000  # of a merge and a shard; more take minutes


def parts(plan: Plan) -> list[Finding]:
    """Check that every rank with keys of a request gives one part."""
    shards, of_shard = np.unique(plan.shard_by_rank, return_index=True)
    ranks_of_shards = dict(sorted(zip(of_shard.tolist(), shards.tolist(), strict=True)))
    if len(plan.document.get("merges", ())) * len(shards) > MOST_MEETINGS:
        raise Undecided(f"merges and shards are more than {MOST_MEETINGS:,} pairs")
    kept_of: dict[int, Ints] = {}
    for where, merge in _merges(plan):
        ranks = [part["rank"] for part in merge["parts"]]
        twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        if twice:
            return finding(
                "lse-part", f"rank {twice[0]} takes part {ranks.count(twice[0])} times", where,
                twice, _picture(merge), times=ranks.count(twice[0]),
            )  # fmt: skip
        if plan.shards == 1:
            continue
        if not plan.ranks:
            raise Absent("the document has no ranks")
        have = {plan.shard(rank) for rank in ranks}
        for rank, shard in ranks_of_shards.items():
            if shard in have:
                continue
            kept = kept_of[shard] = kept_of[shard] if shard in kept_of else plan.kept(rank)
            request = merge.get("request", first_of(kept))
            if request is not None and kept[request]:
                return finding(
                    "lse-part", f"rank {rank} keeps {kept[request]} keys of request {request}, and "
                    "takes no part", where, [rank], _picture(merge), request=request,
                    keys=kept[request],
                )  # fmt: skip
    return []


CHECKS = (
    Check("LSE", "bases", bases),
    Check("LSE", "sinks", sinks),
    Check("LSE", "empty parts", empty),
    Check("LSE", "parts", parts),
)
