# SPDX-License-Identifier: Apache-2.0
"""PAD: attention leaves padding rows out, and no query sees padding keys."""

from __future__ import annotations

import numpy as np

from ...findings import Finding
from ..intervals import first_of
from ..model import Plan
from ..pieces import rows_of_segments
from .check import Check, finding, many


def rows(plan: Plan) -> list[Finding]:
    """Check that no call takes padding rows."""
    segment, run, begin, end = rows_of_segments(plan)
    bad = first_of(plan.rows["request"][run] < 0)
    if bad is None:
        return []
    rank = int(plan.segments["rank"][segment[bad]])
    base = int(plan.row_base(plan.rows)[rank])
    request = int(plan.segments["request"][segment[bad]])
    count = int(end[bad] - begin[bad])
    return finding(
        "pad-rows", f"a call of rank {rank} for request {request} takes "
        f"{many(count, 'row')} of padding", f"row {begin[bad] - base}", [rank],
        row=begin[bad] - base, rows=count,
    )  # fmt: skip


def keys(plan: Plan) -> list[Finding]:
    """Check that no call reads padding keys."""
    calls = plan.segments
    end = calls["first"] + calls["keys"]
    real, whole = plan.lengths[calls["request"]], (plan.lengths + plan.pad)[calls["request"]]
    bad = first_of((plan.shards == 1) & (calls["from"] < 0) & (end > real) & (end <= whole))
    if bad is None:
        return []
    request = int(calls["request"][bad])
    return finding(
        "pad-keys", f"a call of rank {calls['rank'][bad]} reads {end[bad]} keys of request "
        f"{request}, which has {real[bad]} and {plan.pad[request]} of padding",
        f"request {request}, key {real[bad]}", [calls["rank"][bad]],
        f"keys     0-{real[bad] - 1}\npadding  {real[bad]}-{whole[bad] - 1}\n"
        f"read     0-{end[bad] - 1}",
        request=request, keys=end[bad], real=real[bad],
    )  # fmt: skip


def other_requests(plan: Plan) -> list[Finding]:
    """Check that a call takes rows of the request whose keys it reads."""
    segment, run, begin, _ = rows_of_segments(plan)
    owner, wanted = plan.rows["request"][run], plan.segments["request"][segment]
    bad = first_of((owner >= 0) & (owner != wanted))
    if bad is None:
        return []
    rank = int(plan.segments["rank"][segment[bad]])
    into = int(begin[bad] - plan.rows["at"][run[bad]])
    position = int(plan.rows["position"][run[bad]] + into * plan.rows["step"][run[bad]])
    row = int(begin[bad] - plan.row_base(plan.rows)[rank])
    wrong = int(np.sum((owner >= 0) & (owner != wanted)))
    return finding(
        "own-rows", f"row {row} of rank {rank} is position {position} of request {owner[bad]}, a "
        f"call takes it for request {wanted[bad]}", f"request {owner[bad]}, position {position}",
        [rank], row=row, request=owner[bad], taken_for=wanted[bad], calls=wrong,
    )  # fmt: skip


CHECKS = (
    Check("OWN", "segments", other_requests),
    Check("PAD", "rows", rows),
    Check("PAD", "keys", keys),
)
