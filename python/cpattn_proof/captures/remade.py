# SPDX-License-Identifier: Apache-2.0
"""Plans remade from a capture, and predictions for other ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from cpattn.attention import plan_attention
from cpattn.captures.told import TOLD, metadata_digest, plan_digest, written
from cpattn.context_parallel.exchanges import SCRATCH_BYTES
from cpattn.context_parallel.metadata import build_cp_metadata, build_cp_metadata_all_ranks
from cpattn.context_parallel.placement_name import (
    BY_PAGES,
    BY_TOKENS,
    MAX_INTERLEAVE,
    REPLICATED,
    PlacementName,
)
from cpattn.distributed.plans.plan import make_plan
from cpattn.distributed.plans.sharded_plan import make_decode_plan, shard_plan
from cpattn.profiling.calls import Call

from ..findings import Finding, NotUsable, Report
from .fields import PLAN_SIZES
from .reader import Capture, RecordedCall

_MOST_ENTRIES = 1 << 28  # of block tables; more would take gigabytes
_DECODE = "ContextParallel.plan_decode"
_PLANS = ("ContextParallel.plan", _DECODE)


@dataclass
class Remade:
    """Remade plans of one kind of call.

    Attributes
    ----------
    name : str
        Name of the call.
    recorded, here : list of float
        Seconds of each plan in the recording, and now.
    left_out : int
        Number of calls that cannot be remade, as masks are not recorded.
    different : list of RecordedCall
        Calls whose remade plan divides the work differently.
    """

    name: str
    recorded: list[float] = field(default_factory=list)
    here: list[float] = field(default_factory=list)
    left_out: int = 0
    different: list[RecordedCall] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Return name, plans, medians in microseconds then and now, left out, and different."""
        medians = [f"{1e6 * median(times):.1f}" if times else "-" for times in (
            self.recorded, self.here)]  # fmt: skip
        return (
            self.name,
            f"{len(self.here):,}",
            *medians,
            f"{self.left_out:,}",
            f"{len(self.different):,}",
        )


def remake(capture: Capture) -> tuple[Report, list[Remade]]:
    """Remake each plan of a capture, and compare its division of work with the recording.

    Parameters
    ----------
    capture : Capture
        Capture of any machine, as plans do not depend on it.

    Returns
    -------
    Report
        A finding OWN for each kind of plan with a difference: this version distributes tokens or
        keys differently from the recording one, so the two cannot work together.
    list of Remade
        By kind of call.
    """
    begin = time.perf_counter()
    kinds: dict[str, Remade] = {}
    for call in capture.calls:
        if call.name in _AGAIN:
            _compare(kinds.setdefault(call.name, Remade(call.name)), call)
    findings = [_finding(kind, capture) for kind in kinds.values() if kind.different]
    report = Report(
        "replay",
        f"{sum(len(kind.here) for kind in kinds.values()):,} plans",
        tuple(findings),
        checked=("OWN",) if kinds else (),
        not_checked={} if kinds else {"OWN": "there is no plan in the capture"},
        seconds=time.perf_counter() - begin,
    )
    return report, list(kinds.values())


def _compare(kind: Remade, call: RecordedCall) -> None:
    if call.fields.get("masked"):
        kind.left_out += 1
        return
    try:
        seconds, digests = _AGAIN[call.name](call.fields)
    except (KeyError, MemoryError, TypeError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise NotUsable(
            f"{call.name} of rank {call.rank}, {call.at} s: cannot be made again: {reason}"
        ) from None
    kind.here.append(seconds)
    kind.recorded.append(call.seconds)
    if digests != call.fields.get("digests", [call.fields.get("digest")]):
        kind.different.append(call)


def _finding(kind: Remade, capture: Capture) -> Finding:
    call = kind.different[0]
    return Finding(
        "OWN",
        f"{len(kind.different):,} of {len(kind.here):,} plans differ from those recorded",
        where=f"{kind.name}, {call.at:.3f} s after the begin of the capture",
        ranks=(call.rank,),
        advice="Run one version of the library on all ranks and in all steps of a request.",
        details={"recorded_by": sorted({header["cpattn"] for header in capture.headers})},
    )


def _attention_again(fields: Any) -> tuple[float, list[str]]:
    kv_lens, indptr = fields["kv_lens"], fields["page_indptr"]
    rows = [fields["page_ids"][begin:end] for begin, end in pairwise(indptr.tolist())]
    width = max(map(len, rows), default=0)
    if len(rows) != len(kv_lens) or width * len(rows) > _MOST_ENTRIES:
        raise ValueError(
            f"page_indptr must be of {len(kv_lens)} sequences and their tables have at most "
            f"{_MOST_ENTRIES} entries, got {len(rows)} and {width * len(rows)}"
        )
    tables = np.full((len(kv_lens), width), -1, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    seconds, plan = _timed(
        plan_attention,
        q_lens=fields["q_lens"],
        kv_lens=kv_lens,
        block_tables=tables,
        causal=fields["causal"],
        window=fields["window"],
        allow_short_kv=fields["allow_short_kv"],
        batch_invariant=fields["batch_invariant"],
        **{name: fields[name] for name in PLAN_SIZES},
    )
    return seconds, [plan_digest(plan)]


def _metadata_again(fields: Any) -> tuple[float, list[str]]:
    given = {
        name: fields[name]
        for name in ("cp_size", "strategy", "weights", "num_tokens", "kv_len_convention", "compat")
    } | {"page_size": fields["cut_pages"]}
    lens = fields["extend_lens"], fields["seq_lens"]
    if fields["cp_rank"] is None:
        seconds, plans = _timed(build_cp_metadata_all_ranks, *lens, **given)
    else:
        seconds, plan = _timed(build_cp_metadata, *lens, cp_rank=fields["cp_rank"], **given)
        plans = [plan]
    return seconds, [metadata_digest(plan) for plan in plans]


def _timed(make: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = make(*args, **kwargs)
    return time.perf_counter() - begin, result


_AGAIN = {
    "plan_attention": _attention_again,
    "build_cp_metadata": _metadata_again,
    "build_cp_metadata_all_ranks": _metadata_again,
}


def planned_again(
    capture: Capture,
    *,
    ranks: int | None = None,
    strategy: str | None = None,
    placement: str | None = None,
) -> Capture:
    """Return the capture that other ranks would have made: plans all batches again for them.

    Parameters
    ----------
    capture : Capture
        Capture with batches of a `ContextParallel`, decode steps included; those of its lowest rank
        count.
    ranks : int, optional
        Number of ranks; default: the recorded one.
    strategy : str, optional
        Strategy that cuts new tokens; default: the recorded one.
    placement : str, optional
        ``replicated``, ``page_interleave``, ``token_interleave`` or, for runs of I tokens,
        ``token_interleave:I``; default: the recorded one. Keys stay in the recorded pages.
        Replicated pools have no decode plans, so decode steps are then left out.

    Returns
    -------
    Capture
        Only plans, of all ranks; `cpattn plan` predicts their communication.

    Raises
    ------
    NotUsable
        If there is no such batch, or one cannot be planned: unknown names, weights of another
        number of ranks.
    """
    where = None if placement is None else PlacementName.parse(placement)
    if where is None and placement is not None:
        raise NotUsable(
            "planned_again: placement must be 'replicated', 'page_interleave', 'token_interleave' "
            f"or 'token_interleave:I' with I from 1 to {MAX_INTERLEAVE}, got {placement!r:.40}"
        )
    first = min(capture.ranks)
    names = _PLANS[:1] if placement == REPLICATED else _PLANS
    batches = [call for call in capture.of(*names) if call.rank == first]
    if not batches:
        raise NotUsable(f"planned_again: there is no call of {' or '.join(names)}")
    made: list[RecordedCall] = []
    for call in batches:
        try:
            size = call.fields["cp_size"] if ranks is None else ranks
            made += _by_others(call, size, strategy, where)
        except (MemoryError, TypeError, ValueError) as error:
            raise NotUsable(
                f"planned_again: {call.file}, line {call.line}: a batch cannot be planned: {error}"
            ) from None
    headers = [{**capture.headers[0], "rank": rank} for rank in sorted({c.rank for c in made})]
    return Capture(tuple(headers), tuple(made))


def _by_others(
    call: RecordedCall, size: int, strategy: str | None, other: PlacementName | None
) -> Iterator[RecordedCall]:
    """Return the plans of a batch by each of `size` ranks."""
    fields, page_size = call.fields, call.fields["page_size"]
    lens = fields["extend_lens"], fields["seq_lens"]
    given: dict[str, Any] = {"block_tables": fields["block_tables"], "page_size": page_size}
    where = (other or _recorded_name(fields["placement"])).over(size, page_size)
    plans: list[Any]
    if call.name == _DECODE:
        given |= {"q_lens": lens[0], "placement": where}
        given |= dict.fromkeys(("custom_mask", "packed_custom_mask"))
        plans = [make_decode_plan(lens[1], cp_rank=rank, **given) for rank in range(size)]
    else:
        slots = fields["slots"]
        metadata = build_cp_metadata_all_ranks(
            *lens, cp_size=size, strategy=strategy or fields["strategy"],
            num_tokens=None if len(slots) == lens[0].sum() else len(slots),
            weights=fields["weights"], page_size=fields["cut_pages"],
        )  # fmt: skip
        given |= {"out_cache_loc": slots, "pad_to_physical": False}
        plans = [make_plan(one, lens[0], **given) for one in metadata]
        if where is not None:
            sizes: dict[str, Any] = {"exchange": "auto", "max_scratch_bytes": SCRATCH_BYTES}
            plans = [shard_plan(plan, placement=where, **sizes) for plan in plans]
    for rank, plan in enumerate(plans):
        told = Call(call.name, 0, 0, (SimpleNamespace(placement=where), *lens), {}, plan)
        kept = TOLD[call.name](told)
        assert kept is not None  # every plan has it
        fields = written(kept)
        yield RecordedCall(call.name, rank, call.at, call.seconds, fields, call.file, call.line)


def _recorded_name(placement: str | None) -> PlacementName:
    """Return the name of a recorded placement."""
    if placement is None:
        return PlacementName(REPLICATED)
    match = re.fullmatch(r"(Page|Token)Interleave\(shard_size=\d+, \w+=(\d{1,10})\)", placement)
    if match is None:
        raise ValueError(f"keys are kept by {placement}: another placement must be given")
    by_pages = match[1] == "Page"
    return PlacementName(BY_PAGES) if by_pages else PlacementName(BY_TOKENS, int(match[2]))
