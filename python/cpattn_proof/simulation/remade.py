# SPDX-License-Identifier: Apache-2.0
"""Recorded batches on other ranks: planned again, with the resulting rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cpattn.context_parallel.metadata import ContextParallelMetadata, build_cp_metadata_all_ranks

from ..findings import NotUsable
from .steps import Exchange, Planned, Span, Step

_AGREEMENT = " (agreement)"  # exchanges whose sizes do not depend on rows
_ATTENTION = ("ContextParallel.attend", "run_attention")

Batch = list[list[Step]]  # steps of each rank


def remade_steps(
    steps: Sequence[Sequence[Step]], ranks: int | None, strategy: str | None
) -> tuple[list[list[Step]], str]:
    """Return the batches on other ranks or by another strategy, and a phrase for the report.

    Data that every rank sends to all others (its rows, or words of an agreement) also go to all
    others on the new ranks, with the same bytes per row or per message. Attention takes the
    recorded seconds per query-key pair, and all other steps their average.
    """
    size = len(steps) if ranks is None else ranks
    made: list[list[Step]] = [[] for _ in range(size)]
    names = set()
    for batch in _batches(steps):
        name = strategy or batch[0][0].terms["strategy"]  # type: ignore[union-attr]
        names.add(name)
        for rank, of_rank in enumerate(_remade(batch, size, str(name))):
            made[rank] += of_rank
    return made, f"planned again by {', '.join(sorted(map(str, names)))}"


def _batches(steps: Sequence[Sequence[Step]]) -> Iterator[Batch]:
    """Split steps into batches, each from one plan to the next, for all ranks."""
    cut = [list(_cut(of_rank)) for of_rank in steps]
    if len({len(batches) for batches in cut}) > 1 or not cut[0]:
        raise NotUsable(
            "simulate_capture: ranks must have planned as many batches by ContextParallel.plan, "
            f"at least one, to be planned again; got {[len(batches) for batches in cut]}"
        )
    for batch in zip(*cut, strict=True):
        yield list(batch)


def _cut(steps: Sequence[Step]) -> Iterator[list[Step]]:
    batch: list[Step] = []
    for step in steps:
        if isinstance(step, Planned):
            if step.kind != "ContextParallel.plan":
                raise NotUsable(
                    f"simulate_capture: what ranks send after {step.kind} ({step.site}) cannot be "
                    "planned again; as recorded, it can be simulated, and cpattn lint --ranks "
                    "plans the step for others"
                )
            if batch:
                yield batch
            batch = []
        if batch or isinstance(step, Planned):
            batch.append(step)
    if batch:
        yield batch


def _remade(batch: Batch, size: int, strategy: str) -> Iterator[list[Step]]:
    plans = [of_rank[0] for of_rank in batch]
    assert all(isinstance(plan, Planned) for plan in plans)
    first = plans[0]
    assert isinstance(first, Planned)
    fields = first.call.fields
    if fields["placement"] is not None:
        raise NotUsable(
            f"simulate_capture: keys are kept by {fields['placement']} ({first.site}): what ranks "
            "send then cannot be planned again; cpattn plan --placement predicts it, and cpattn "
            "lint --ranks plans the batch for others"
        )
    if fields["weights"] is not None or fields["cut_pages"] is not None:
        raise NotUsable(
            f"simulate_capture: {first.site}: weights or whole pages cut the batch, which is not "
            "planned again for other ranks; as recorded, it can be simulated"
        )
    recorded = _metadata(fields, len(batch), fields["strategy"])
    rows = [len(plan.local_q_indices) for plan in recorded]
    if rows != list(fields["rows_per_rank"]):
        raise NotUsable(
            f"simulate_capture: {first.site}: rows_per_rank {list(fields['rows_per_rank'])} are "
            f"not those of its lengths, {rows}: padding cannot be planned again"
        )
    new = _metadata(fields, size, strategy)
    new_rows = [len(plan.local_q_indices) for plan in new]
    pace = _seconds_a_pair(batch, recorded)
    template = [_Template(step, batch, number, rows) for number, step in enumerate(batch[0])]
    terms = {**first.terms, "cp_size": size, "strategy": strategy}
    for rank in range(size):
        steps: list[Step] = [replace(first, terms=terms)]
        for part in template[1:]:
            steps.append(part.on(rank, new_rows, _pairs(new[rank]) * pace))
        yield steps


class _Template:
    """Step that all ranks of a batch took, for any number of ranks."""

    def __init__(self, step: Step, batch: Batch, number: int, rows: Sequence[int]) -> None:
        self.step = step
        self.bytes, self.bytes_a_row, self.seconds = 0, 0, 0.0
        same = [of_rank[number] for of_rank in batch if number < len(of_rank)]
        if len(same) < len(batch) or any(_kind(other) != _kind(step) for other in same):
            raise NotUsable(
                f"simulate_capture: {step.site}: ranks did not take the same steps, so that they "
                "cannot be planned again; as recorded, they can be simulated"
            )
        if isinstance(step, Exchange):
            self._read(same, rows)
        elif isinstance(step, Span):
            spans = [other.seconds for other in same if isinstance(other, Span)]
            self.seconds = sum(spans) / len(spans)

    def _read(self, exchanges: Sequence[Step], rows: Sequence[int]) -> None:
        """Find the bytes, or bytes per row, that every rank sends to all others."""
        sizes = []
        for rank, one in enumerate(exchanges):
            assert isinstance(one, Exchange)
            others = set(range(len(rows))) - {rank}
            if set(one.sends) != others or len(set(one.sends.values())) > 1:
                raise self._cannot_be()
            sizes.append(next(iter(one.sends.values()), 0))
        if len(rows) == 1:
            raise NotUsable(
                "simulate_capture: one rank sends nothing, so that nothing is known of what "
                "several would; cpattn plan --capture predicts that"
            )
        if self.step.name.endswith(_AGREEMENT):  # type: ignore[union-attr]
            self.bytes = sizes[0]
            return
        widths = {size // count for size, count in zip(sizes, rows, strict=True) if count}
        self.bytes_a_row = widths.pop() if len(widths) == 1 else 0
        if [self.bytes_a_row * count for count in rows] != sizes:
            raise self._cannot_be()

    def _cannot_be(self) -> NotUsable:
        return NotUsable(
            f"simulate_capture: {self.step.site}: what is sent is not a rank's own rows to all "
            "others, and cannot be planned again; as recorded, it can be simulated"
        )

    def on(self, rank: int, rows: Sequence[int], seconds_of_attention: float) -> Step:
        """Return the step of a new rank."""
        if isinstance(self.step, Exchange):
            others = [other for other in range(len(rows)) if other != rank]
            sizes = [self.bytes + self.bytes_a_row * count for count in rows]
            sends = dict.fromkeys(others, sizes[rank])
            receives = {other: sizes[other] for other in others}
            return replace(self.step, sends=sends, receives=receives)
        assert isinstance(self.step, Span)
        is_attention = self.step.name in _ATTENTION
        return replace(self.step, seconds=seconds_of_attention if is_attention else self.seconds)


def _kind(step: Step) -> tuple[type, str]:
    return type(step), step.kind if isinstance(step, Planned) else step.name


def _metadata(fields: Any, size: int, strategy: str) -> list[ContextParallelMetadata]:
    lens = fields["extend_lens"], fields["seq_lens"]
    try:
        return build_cp_metadata_all_ranks(*lens, cp_size=size, strategy=strategy)
    except ValueError as error:
        raise NotUsable(f"simulate_capture: a batch cannot be planned again: {error}") from None


def _pairs(plan: ContextParallelMetadata) -> int:
    """Return the query-key pairs of a rank under a causal mask."""
    return int(plan.query_cache_lengths.sum())


def _seconds_a_pair(batch: Batch, plans: Sequence[ContextParallelMetadata]) -> float:
    """Return the seconds of attention per pair in one layer, from all records of the batch."""
    spans = [
        (step.seconds, _pairs(plan))
        for of_rank, plan in zip(batch, plans, strict=True)
        for step in of_rank
        if isinstance(step, Span) and step.name in _ATTENTION
    ]
    pairs = sum(pair for _, pair in spans)
    return sum(seconds for seconds, _ in spans) / pairs if pairs else 0.0
