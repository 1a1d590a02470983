# SPDX-License-Identifier: Apache-2.0
"""Differences between gathered results and attention over all keys, and their cause."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from ..conformance.faults import FAULTS, Fault
from ..conformance.judgement import Result, differences, off_by
from ..conformance.numbers import Array, first_of
from ..conformance.oracle import Attended, attend
from ..conformance.tolerances import FIT
from ..findings import Finding
from .rings import oracles
from .rows import Record, Rows, together

# Most scores of all wrong oracles of one call: some seconds.
_MOST_WORK = 2**27
_MOST_ORACLES = 64  # of rings
_VARIANTS = sum(len(fault.variants) for fault in FAULTS.values())


def judge(records: Sequence[Record]) -> list[Finding]:
    """Judge one call of all ranks."""
    rows = together(records)
    if isinstance(rows, Finding):
        return [rows]
    for batch in rows:
        if found := _Judged.of(batch).findings(len(records)):
            return found
    return []


class _Judged(NamedTuple):
    """Results with the correct values."""

    rows: Rows
    result: Result
    expected: Attended
    wrong: Array  # [rows], bool

    @classmethod
    def of(cls, rows: Rows) -> _Judged:
        expected = attend(rows.batch)
        out = np.where(rows.has[:, None, None], rows.out, expected.out)
        lse = None if rows.lse is None else np.where(rows.has[:, None], rows.lse, expected.lse)
        result = Result(rows.batch.case, "answered", out, lse)
        return cls(rows, result, expected, _rows(differences(result, expected)))

    def findings(self, ranks: int) -> list[Finding]:
        if not self.wrong.any():
            return []
        fault, detail = self._of_ring(ranks) or self._of_operator()
        rows, wrong = self.rows, np.flatnonzero(self.wrong)
        sequence, position = map(int, rows.place[wrong[0]])
        at_fault = np.unique(rows.rank[wrong]).tolist()
        channel = "out" if differences(self.result, self.expected).out.any() else "lse"
        said = off_by(self.result, self.expected, channel)
        name = "the output" if channel == "out" else "the log-sum-exp"
        return [
            Finding(
                "LSE" if channel == "lse" else fault.invariant,
                f"the program {fault.means}{f' ({detail})' if detail else ''}: {name} {said} "
                f"({len(wrong)} of {int(rows.has.sum())} rows)",
                where=f"{rows.site}: position {position} of sequence {sequence}",
                ranks=tuple(at_fault), picture=self._picture(at_fault), advice=fault.advice,
                kind=fault.name,
                details={
                    "sequence": sequence, "position": position, "rows": len(wrong),
                    "detail": detail,
                },
            )
        ]  # fmt: skip

    def _of_ring(self, ranks: int) -> tuple[Fault, str] | None:
        """Return the first wrong oracle of a ring that explains all ranks with wrong rows."""
        work = self.rows.batch.case.num_heads * sum(
            q * kv for q, kv in zip(*self._lens, strict=True)
        )
        most = min(_MOST_ORACLES, _MOST_WORK // max(work * ranks, 1))
        wrong_ranks = np.unique(self.rows.rank[self.wrong])
        concerned = np.isin(self.rows.rank, wrong_ranks) & self.rows.has
        for oracle in islice(oracles(self.rows, ranks), most):
            wrong = attend(self.rows.batch, oracle.switches, oracle.parts)
            if not (_rows(differences(self.result, wrong, FIT)) & concerned).any():
                return oracle.fault, oracle.detail
        return None

    def _of_operator(self) -> tuple[Fault, str]:
        """Return the fault that `conform` would name, if all ranks are wrong in the same way."""
        case = self.result.case
        work = case.num_heads * sum(q * kv for q, kv in zip(*self._lens, strict=True))
        if work * _VARIANTS > _MOST_WORK:
            return FAULTS["unknown"], "too large for a diagnosis"
        from ..conformance.attention import AttentionTrial  # it needs hypothesis
        from ..conformance.diagnosis import diagnose

        trial = AttentionTrial(self.result)
        vars(trial).update(batch=self.rows.batch, expected=self.expected)
        return diagnose([trial])[0].fault, ""

    @property
    def _lens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.result.case.q_lens, self.result.case.kv_lens

    def _picture(self, ranks: list[int]) -> str:
        """Draw a line for each rank: its first wrong row, and the number with the largest error."""
        lines = []
        for rank in ranks:
            wrong = np.flatnonzero(self.wrong & (self.rows.rank == rank))
            row = int(wrong[0])
            lines.append(
                f"rank {rank}  {self._number(row)}; wrong: rows "
                f"{first_of(self.rows.row[wrong])} of {int((self.rows.rank == rank).sum())}"
            )
        return "\n".join(lines)

    def _number(self, row: int) -> str:
        """Return the number of a row with the largest error."""
        place = f"row {self.rows.row[row]} (position {self.rows.place[row, 1]})"
        found = differences(self.result, self.expected)
        kind, flags = ("out", found.out) if found.out[row].any() else ("lse", found.lse)
        got: Any = getattr(self.result, kind)[row]
        right: Any = getattr(self.expected, kind)[row]
        with np.errstate(invalid="ignore"):
            error = np.where(flags[row], np.nan_to_num(np.abs(got - right), nan=np.inf), -1)
        at = np.unravel_index(int(np.argmax(error)), error.shape)
        index = ", ".join(map(str, at))
        return f"{place}: {kind}[{index}] is {got[at]:.6g}, not {right[at]:.6g}"


def _rows(found: Any) -> Array:
    """Return the rows, [rows], with a difference in any head."""
    rows: Array = found.out.any(axis=(1, 2)) | found.lse.any(axis=1)
    return rows
