# SPDX-License-Identifier: Apache-2.0
"""Choice of few rows from a product of parameters, so that each pair of values still meets."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of `product(*values)` in which each two values of two parameters meet.

    The choice is greedy and always the same. Positions distinguish values.
    """
    rows = list(product(*(range(len(v)) for v in values)))
    pairs = list(combinations(range(len(values)), 2))
    missing = {(i, j, row[i], row[j]) for row in rows for i, j in pairs}
    chosen = []
    while missing:
        best = max(rows, key=lambda r: sum((i, j, r[i], r[j]) in missing for i, j in pairs))
        missing -= {(i, j, best[i], best[j]) for i, j in pairs}
        chosen.append(tuple(v[k] for v, k in zip(values, best, strict=True)))
    return chosen
