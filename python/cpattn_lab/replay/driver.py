# SPDX-License-Identifier: Apache-2.0
"""Loop of `cpattn replay`: schedules a batch, runs it on all ranks, checks and records it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from cpattn._core import __version__, active_isa
from cpattn.doctor.cpu_name import cpu_name
from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch, prefill_batches

from ..processes.hosts import Hosts
from ..processes.workers import Role, Workers
from ..traffic.trace import block_tokens_of, scale_lengths, unbounded_hits
from .comparison import SampledRows
from .dense.check import Checker, sample_rows
from .disaggregation.check import DecodeChecker, SparseDecodeChecker
from .disaggregation.driver import Disaggregation, decode_roles, num_slots
from .disaggregation.endpoint import require_engine
from .dsa.check import SparseChecker
from .memory import peak_resident_bytes
from .messages import RankResult, Work, WorkerConfig, on_hosts, ranks_of, run
from .records import BatchRecord, ReplayOptions, ReplayReport

_CHECKERS = {"dense": Checker, "dsa": SparseChecker}
_DECODE_CHECKERS = {"dense": DecodeChecker, "dsa": SparseDecodeChecker}


def replay(
    requests: Sequence[Request],
    options: ReplayOptions,
    *,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    sampled: SampledRows | None = None,
    oracle: bool = True,
) -> ReplayReport:
    """Replay `requests` over `options.num_processes` processes.

    `sampled` gets the rows to compare; without `oracle` there is no other check. `progress` is
    called with the number of finished prompt tokens, their total, and the current work. WorkerError
    if a process dies; ImportError if there is no engine for `decode_tokens`; `HostsError` if
    `options.hosts` cannot be made.
    """
    begin = time.perf_counter()
    if options.decode_tokens:
        require_engine()  # a missing engine is reported before any process starts
    requests = scale_lengths(requests, options.scale_lengths)
    total = sum(request.input_length for request in requests)
    cache = PrefixCache(
        options.num_pages,
        page_size=options.page_size,
        block_tokens=options.block_tokens,
        shard_size=options.page_shards,
    )
    batches = prefill_batches(
        requests, cache, token_budget=options.token_budget, max_sequences=options.max_sequences
    )
    batch: Batch | None = next(batches)  # refuses impossible requests before any process starts
    checker = _make_checker(options) if oracle else None
    report = ReplayReport(
        options=options,
        environment=_environment(options),
        num_requests=len(requests),
        input_tokens=total,
        unbounded_hit_tokens=sum(unbounded_hits(requests, options.block_tokens)),
        tolerance=checker.tolerance if checker else None,
    )
    progress(0, total, f"starting {options.num_processes} processes")
    done = 0
    hosts = Hosts(options.hosts, link_gbps=options.link_gbps) if options.hosts > 1 else None
    with (
        hosts or nullcontext(),
        Workers(_roles(options, hosts), lambda what, _: progress(0, total, what)) as workers,
    ):
        decoding = None
        if options.decode_tokens:
            assert checker is None or isinstance(checker, DecodeChecker)
            decoding = Disaggregation(options, workers, checker)
            report.decode = decoding.report
        while batch:
            size = batch.num_tokens + batch.hit_tokens
            progress(done, total, f"batch {batch.index}")
            tell = _Telling(progress, batch.index, done, size, total)
            workers.told = tell.of_part(0.0, 0.5 if checker else 1.0)
            if checker:
                checker.tell = tell.of_part(0.5, 0.5)
            _step(batch, workers, checker, report, decoding, sampled)
            done += size
            batch = next(batches, None)
        if decoding:
            progress(done, total, "last tokens")
            decoding.wait()
        if hosts:
            report.link_bytes = hosts.received_bytes()
        progress(done, total, "ending the processes")
    if checker:
        _add_check(report, checker)
    report.evictions = cache.evictions
    report.check_peak_bytes = peak_resident_bytes()
    report.wall_seconds = time.perf_counter() - begin
    return report


class _Telling:
    """Progress within a batch, with parts for ranks and check; it never decreases."""

    def __init__(
        self,
        progress: Callable[[int, int, str], None],
        index: int,
        done: int,
        size: int,
        total: int,
    ) -> None:
        self._progress, self._index, self._total = progress, index, total
        self._reached, self._begin, self._size = done, done, size

    def of_part(self, first: float, length: float) -> Callable[[str, float], None]:
        """Return a function of (what, share) that reports progress in a part from `first`."""

        def tell(what: str, share: float) -> None:
            tokens = self._begin + int(self._size * (first + length * share))
            self._reached = max(self._reached, tokens)
            self._progress(self._reached, self._total, f"batch {self._index}: {what}")

        return tell


def _step(
    batch: Batch,
    workers: Workers,
    checker: Checker | None,
    report: ReplayReport,
    decoding: Disaggregation | None,
    sampled: SampledRows | None,
) -> None:
    """Run one batch, compare its results, and add it to the report."""
    rows = np.empty(0, dtype=np.int64)
    if checker or sampled is not None:
        options = report.options
        rows = sample_rows(batch, seed=options.model.seed, rows_per_chunk=options.check_rows)
    delivery = decoding.prepare(batch) if decoding else None
    results = run(workers, Work(batch, _token_ids(batch, report.options), rows, delivery))
    report.batches.append(_record(batch, results, report.options.attention_phases))
    report.hit_tokens += batch.hit_tokens
    report.peak_bytes = [result.peak_bytes for result in results]
    report.pool_bytes = [result.pool_bytes for result in results]
    ((hidden, chosen),) = [(r.rows, r.chosen) for r in results if r.rows is not None]
    if sampled is not None:
        sampled.add(batch, rows, hidden)
    if checker:
        checker.compare(batch, rows, hidden, chosen)
    if decoding and delivery:
        decoding.hand_over(batch, delivery, results)


def _add_check(report: ReplayReport, checker: Checker) -> None:
    report.checked_rows = checker.num_rows
    report.check_seconds = checker.seconds
    for record in report.batches:
        record.max_error = checker.errors.get(record.index)
    if isinstance(checker, SparseChecker):
        report.checked_keys, report.swapped_keys = checker.num_keys, checker.num_swapped
    if isinstance(checker, DecodeChecker):
        assert report.decode
        report.decode.checked_tokens = checker.num_tokens
        report.decode.wrong_tokens = checker.num_wrong
        report.decode.near_ties = checker.num_near_ties
        report.decode.max_error = checker.decode_error


def fast_dtype() -> str:
    """Return bfloat16 if kernels have an instruction for its products, else float32."""
    return "bfloat16" if active_isa() in ("avx512bf16", "amx", "neonbf16") else "float32"


def _make_checker(options: ReplayOptions) -> Checker | None:
    if not options.check_rows:
        return None
    checkers = _DECODE_CHECKERS if options.decode_tokens else _CHECKERS
    kind: Any = checkers[options.model.kind]
    return kind(options.model, block_tokens=options.block_tokens, rows_per_chunk=options.check_rows)


def num_threads(options: ReplayOptions) -> int:
    """Return the number of threads of each process."""
    return options.num_threads or max(1, len(os.sched_getaffinity(0)) // options.num_processes)


def _worker_config(options: ReplayOptions) -> WorkerConfig:
    return WorkerConfig(
        model=options.model,
        cp_size=options.cp_size,
        strategy=options.strategy,
        weights=options.weights,
        page_size=options.page_size,
        num_pages=options.rank_pages,
        num_threads=num_threads(options),
        torch_baseline=options.torch_baseline,
        timeout_seconds=options.timeout_seconds,
        pp_size=options.pp_size,
        num_slots=num_slots(options) if options.decode_tokens else 0,
        placement=options.placement_name.over(options.cp_size, options.page_size),
        exchange=options.exchange,
    )


def _roles(options: ReplayOptions, hosts: Hosts | None) -> list[Role]:
    decode = decode_roles(options, num_threads(options)) if options.decode_tokens else []
    ranks = ranks_of(_worker_config(options))
    return on_hosts(ranks, hosts) + on_hosts(decode, hosts)


def _token_ids(batch: Batch, options: ReplayOptions) -> Any:
    return np.concatenate(
        [
            block_tokens_of(
                chunk.request,
                chunk.begin,
                chunk.end,
                block_tokens=options.block_tokens,
                vocab_size=options.model.vocab_size,
                seed=options.model.seed,
            )
            for chunk in batch.chunks
        ]
    )


def _record(
    batch: Batch, results: Sequence[RankResult], attention_phases: Sequence[str]
) -> BatchRecord:
    torch_seconds = [r.torch_seconds for r in results if r.torch_seconds]
    differences = [r.torch_difference for r in results if r.torch_difference is not None]
    over_codes = [r.error_over_codes for r in results if r.error_over_codes is not None]
    return BatchRecord(
        index=batch.index,
        num_sequences=len(batch.chunks),
        num_chunks=sum(not (chunk.is_first and chunk.is_last) for chunk in batch.chunks),
        new_tokens=batch.num_tokens,
        prefix_tokens=sum(batch.prefix_lens),
        seconds=max(sum(result.seconds.values()) for result in results),
        phases=_mean([result.seconds for result in results]),
        flops={phase: sum(r.flops[phase] for r in results) for phase in results[0].flops},
        rank_rows=[result.num_rows for result in results],
        rank_pairs=[result.num_pairs for result in results],
        rank_attention_seconds=[
            sum(result.seconds[phase] for phase in attention_phases) for result in results
        ],
        torch_seconds=_mean(torch_seconds) if torch_seconds else None,
        torch_difference=max(differences) if differences else None,
        error_over_codes=max(over_codes) if over_codes else None,
        rank_sent_bytes=[result.sent_bytes for result in results],
        exchange=results[0].exchange,
    )


def _mean(by_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    return {phase: float(np.mean([rank[phase] for rank in by_rank])) for phase in by_rank[0]}


def _environment(options: ReplayOptions) -> dict[str, Any]:
    return {
        "cpattn": __version__,
        "isa": active_isa(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_per_rank": num_threads(options),
    }
