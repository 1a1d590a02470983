# SPDX-License-Identifier: Apache-2.0
"""Trials of attention: judgement, faults beyond single oracles, and errors as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .cases import Batch, make_batch
from .faults import FAULTS
from .judgement import Differences, Result, differences, fits, off_by
from .numbers import Array, first_of
from .oracle import Attended, attend
from .strategies import cases, edge_cases
from .switches import RIGHT, Switches, can_matter, changed_by
from .tolerances import ACCUMULATOR_RATIO
from .trials import Kind, Trial

_MOST_ROWS, _MOST_KEYS = 8, 48  # most rows and keys in a picture
_VISIBLE_CHANGE = 0.01  # least change of a weight that a picture shows


@dataclass(frozen=True, eq=False)
class AttentionTrial(Trial):
    """Result of attention; its oracles are `Switches`."""

    @cached_property
    def batch(self) -> Batch:
        return make_batch(self.case)

    @cached_property
    def expected(self) -> Attended:
        return attend(self.batch)

    @cached_property
    def found(self) -> Differences:
        """Return the differences from the oracle."""
        return differences(self.result, self.expected)

    @cached_property
    def verdict(self) -> str:
        """Return "right", "out" or "lse" for a fault, a side effect, or why there is no answer."""
        if self.result.status != "answered":
            return self.result.status
        if self.found.out.any():
            return "out"
        return "lse" if self.found.lse.any() else self.result.side_effect or "right"

    @property
    def wrong_rows(self) -> Array:
        """Return the wrong rows, bool [rows, heads]."""
        rows: Array = self.found.out.any(axis=-1) | self.found.lse
        return rows

    def agrees_with(self, oracle: Switches) -> bool:
        """Tell whether a wrong oracle gives the same outputs, or the LSE beside right outputs."""
        return super().agrees_with(oracle if can_matter(oracle, self.case) else RIGHT)

    def _compare(self, oracle: Switches) -> bool:
        channel = "out" if self.verdict == "out" else "lse"
        return fits(self.result, attend(self.batch, oracle), channel, oracle)

    def is_changed_by(self, oracle: Switches) -> bool:
        lse = None if self.result.lse is None else self.expected.lse
        right = Result(self.case, "answered", self.expected.out, lse)
        return not fits(right, attend(self.batch, oracle), "lse", oracle)

    def name_of_form(self, right: Sequence[Trial]) -> str:
        """Tell values as wide as keys from others, if no other case came out right."""
        if self.verdict == "wrong-form" and self.case.v_head_dim != self.case.head_dim:
            widths = {trial.case.v_head_dim == trial.case.head_dim for trial in right}
            return "v-head-dim" if widths == {True} else self.verdict
        return super().name_of_form(right)

    def said(self) -> str:
        if self.verdict not in ("out", "lse"):
            return super().said()
        name = "the output" if self.verdict == "out" else "the log-sum-exp"
        return f"{name} {off_by(self.result, self.expected, self.verdict)}"

    def picture(self) -> str:
        return _picture(self) if self.verdict in ("out", "lse") else super().picture()


def _rule(wrong: Sequence[AttentionTrial], right: Sequence[AttentionTrial]) -> str:
    """Name a fault that no single oracle explains, or return ""."""
    if wrong[0].verdict != "out":
        return ""
    if _only_poison(wrong, right):
        return "reads-beyond-length"
    single = [trial for trial in right if trial.case.dtype == "float32"]
    narrow = all(trial.case.dtype != "float32" for trial in wrong)
    tried = single or all(trial.case.dtype != "float32" for trial in right)
    accumulated = narrow and tried and all(map(_looks_accumulated, wrong))
    return "16-bit-accumulation" if accumulated else ""


def _only_poison(wrong: Sequence[AttentionTrial], right: Sequence[AttentionTrial]) -> bool:
    """Tell whether the only errors are NaN, in places explained by poisoned hidden keys.

    Kernels that skip pages for some rows, and multiply the hidden keys of other rows by weight 0,
    give NaN in rows that no oracle predicts.
    """
    return any(not trial.case.poison for trial in right) and all(
        trial.case.poison and np.isnan(_given(trial)[trial.found.out]).all() for trial in wrong
    )


def _given(trial: AttentionTrial) -> Array:
    """Return the output of an operator that answered."""
    assert trial.result.out is not None
    return trial.result.out


def _looks_accumulated(trial: AttentionTrial) -> bool:
    """Tell whether errors have the size of a 16-bit sum."""
    simulated = attend(trial.batch, replace(RIGHT, accumulator=trial.case.dtype)).out
    error, predicted = _given(trial) - trial.expected.out, simulated - trial.expected.out
    if not np.isfinite(error).all():
        return False
    size, usual = (float(np.sqrt(np.mean(x * x))) for x in (error, predicted))
    return usual > 0 and usual / ACCUMULATOR_RATIO <= size <= usual * ACCUMULATOR_RATIO


def _covers(tried: Sequence[AttentionTrial]) -> dict[str, bool]:
    return {
        "OWN": any(len(t.case.q_lens) > 1 for t in tried),
        "COV": True,
        "LEN": any(len(set(t.case.kv_lens)) > 1 for t in tried),
        "LSE": any(t.result.lse is not None or t.case.sinks for t in tried),
        "ADDR": any(t.case.far == 31 for t in tried),
        "PAD": any(t.case.pad_rows or t.case.poison for t in tried),
    }


def _picture(trial: AttentionTrial) -> str:
    """Draw a line for each of the first wrong rows, with the keys of wrong weight."""
    rows, heads = np.nonzero(trial.wrong_rows)
    lines = [_row(trial, int(r), int(h)) for r, h in zip(rows[:3], heads[:3], strict=True)]
    return "\n".join([*lines, _pattern(trial), *_weights(trial, int(heads[0]))])


def _pattern(trial: AttentionTrial) -> str:
    """Describe which rows and heads are wrong, in a line."""
    wrong = trial.wrong_rows
    by_row, by_head = wrong.any(axis=1), wrong.any(axis=0)
    return (
        f"wrong: {_some(by_row, 'row')}, {_some(by_head, 'head')}, "
        f"{int(np.sum(wrong))} of {wrong.size} in all"
    )


def _some(flags: Any, name: str) -> str:
    if flags.all():
        return f"every {name}"
    chosen = np.flatnonzero(flags)
    return f"{name}{'s' * (len(chosen) > 1)} {first_of(chosen)} of {len(flags)}"


def _row(trial: AttentionTrial, row: int, head: int) -> str:
    """Return the numbers of a row with the largest errors."""
    assert trial.result.out is not None
    if trial.found.out[row, head].any():
        i = int(np.argmax(trial.found.out[row, head]))
        got, right = trial.result.out[row, head, i], trial.expected.out[row, head, i]
        return f"row {row}, head {head}: out[{i}] is {got:.6g}, not {right:.6g}"
    assert trial.result.lse is not None
    got, right = trial.result.lse[row, head], trial.expected.lse[row, head]
    return f"row {row}, head {head}: the log-sum-exp is {got:.6g}, not {right:.6g}"


def _weights(trial: AttentionTrial, head: int) -> list[str]:
    """Return keys with more or less weight than they should have, computed from the outputs.

    Values of few keys are linearly independent, so outputs determine the weights.
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


AttentionTrial.kind = ATTENTION = Kind(
    edge_cases, cases, lambda result, signature: AttentionTrial(result),
    channels=("out", "lse"), faults=FAULTS, unknown="unknown", right=RIGHT, rule=_rule, chance=8,
    together=lambda one, other: replace(other, **changed_by(one)),
    told=lambda oracle: dict(changed_by(oracle)),
    covers=_covers,
    reasons={
        "OWN": "no batch of several sequences was answered",
        "LEN": "no batch of several lengths was answered",
        "LSE": "there is no log-sum-exp, and there are no sinks",
        "ADDR": "no cache is as large as 31 bits",
        "PAD": "no case has padding",
        "SEQ": "an operator issues no collectives",
        "XFER": "an operator sends nothing",
        "LAYOUT": "the tool writes the caches, as the signature says",
        "TOPK": "an operator that selects keys has a signature of its own",
        "BAL": "time is not measured",
        "RES": "an operator asserts nothing",
    },
)  # fmt: skip
