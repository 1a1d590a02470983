# SPDX-License-Identifier: Apache-2.0
"""Errors as text: where they are over rows, heads and keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from .numbers import Array
from .trials import Trial

_MOST_ROWS, _MOST_KEYS = 8, 48
_VISIBLE_CHANGE = 0.01  # of a weight, in a picture


def picture(trial: Trial) -> str:
    """A line for each of the first wrong rows, or why there is no answer."""
    if trial.verdict not in ("out", "lse"):
        return trial.result.message
    rows, heads = np.nonzero(trial.wrong_rows)
    lines = [_row(trial, int(r), int(h)) for r, h in zip(rows[:3], heads[:3], strict=True)]
    return "\n".join([*lines, pattern(trial), *_weights(trial, int(heads[0]))])


def pattern(trial: Trial) -> str:
    """Which rows and heads are wrong, in a line."""
    wrong = trial.wrong_rows
    by_row, by_head = wrong.any(axis=1), wrong.any(axis=0)
    return (
        f"wrong: {_some(by_row, 'row')}, {_some(by_head, 'head')}, "
        f"{int(np.sum(wrong))} of {wrong.size} in all"
    )


def _some(flags: Any, name: str) -> str:
    if flags.all():
        return f"every {name}"
    chosen = np.nonzero(flags)[0]
    shown = ", ".join(map(str, chosen[:6])) + (", ..." if len(chosen) > 6 else "")
    return f"{name}{'s' * (len(chosen) > 1)} {shown} of {len(flags)}"


def _row(trial: Trial, row: int, head: int) -> str:
    """The numbers of a row that disagree most."""
    assert trial.result.out is not None
    if trial.found.out[row, head].any():
        i = int(np.argmax(trial.found.out[row, head]))
        got, right = trial.result.out[row, head, i], trial.expected.out[row, head, i]
        return f"row {row}, head {head}: out[{i}] is {got:.6g}, not {right:.6g}"
    assert trial.result.lse is not None
    got, right = trial.result.lse[row, head], trial.expected.lse[row, head]
    return f"row {row}, head {head}: the log-sum-exp is {got:.6g}, not {right:.6g}"


def _weights(trial: Trial, head: int) -> list[str]:
    """Keys that have more or less weight than they should, found from the outputs.

    Values of few keys are linearly independent, so that outputs tell the weights.
    """
    case = trial.case
    lines: list[str] = []
    kv_head = head // (case.num_heads // case.num_kv_heads)
    for s, kv_len in enumerate(case.kv_lens):
        begin, end = trial.batch.q_starts[s], trial.batch.q_starts[s + 1]
        rows = [r for r in range(begin, end) if trial.found.out[r, head].any()]
        if not rows or not 0 < kv_len <= min(case.v_head_dim, _MOST_KEYS):
            continue
        v = trial.batch.tokens_of(trial.batch.v, s)[:, kv_head].astype(np.float64)
        solve = np.linalg.pinv(v.T)
        assert trial.result.out is not None
        for r in rows[: _MOST_ROWS - len(lines)]:
            with np.errstate(invalid="ignore"):
                change = solve @ (trial.result.out[r, head] - trial.expected.out[r, head])
            lines.append(f"row {r:3} keys {_marks(change)}")
    return [f"weights, head {head}: + more, - less, . as they should", *lines] * bool(lines)


def _marks(change: Array) -> str:
    if not np.isfinite(change).all():
        return "?" * len(change)
    return "".join("." if abs(x) <= _VISIBLE_CHANGE else "+" if x > 0 else "-" for x in change)
