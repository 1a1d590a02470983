# SPDX-License-Identifier: Apache-2.0
"""Driver's part of disaggregated serving: has a decode process continue the ranks' prompts.

Decoding the prompts of one batch overlaps with the prefill of the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.scheduler import Batch

from ...processes.workers import Role, Workers
from ..messages import RankResult
from ..records import DecodeReport, ReplayOptions, RequestRecord, TransferRecord
from .check import DecodeChecker
from .decode import DecodeConfig, DecodeResult
from .handover import Continuation, Delivery, Handover, decode_pool_pages

DECODE_RANK = "cpattn_lab.replay.disaggregation.decode.DecodeRank"


def decode_roles(options: ReplayOptions, num_threads: int) -> list[Role]:
    """Return the role of the decode process, or of several that share out the pages."""
    size = options.decode_ranks
    config = DecodeConfig(
        model=options.model,
        page_size=options.page_size,
        num_pages=decode_pages(options) // size,
        num_slots=num_slots(options),
        num_threads=num_threads,
        num_ranks=size,
        timeout_seconds=options.timeout_seconds,
    )
    names = [f"decode rank {rank}" for rank in range(size)] if size > 1 else ["the decode process"]
    return [Role(name, DECODE_RANK, rank, config) for rank, name in enumerate(names)]


class Disaggregation:
    """Decode processes among `workers`, and their pool."""

    def __init__(
        self, options: ReplayOptions, workers: Workers, checker: DecodeChecker | None
    ) -> None:
        ranks = range(options.num_ranks)
        self._decode = workers.numbered(DECODE_RANK)
        self._workers = workers
        self._checker = checker
        self._handover = Handover(
            PrefixCache(
                decode_pages(options),
                page_size=options.page_size,
                block_tokens=options.block_tokens,
                shard_size=options.decode_ranks,
            ),
            decode_tokens=options.decode_tokens,
            num_slots=num_slots(options),
        )
        self._running: tuple[Continuation, ...] = ()
        self._prefill_seconds: dict[int, float] = defaultdict(float)  # seconds by request
        self._transfer_seconds: dict[int, float] = defaultdict(float)
        self.report = DecodeReport()
        workers.call(self._decode, "peer")
        workers.call(ranks, "connect", *workers.answers(self._decode))
        workers.answers(ranks)

    def prepare(self, batch: Batch) -> Delivery:
        """Find room for the prompts of `batch`, and return what to send after it."""
        for chunk in batch.chunks:
            if not self._handover.reserve(chunk):
                self.wait()
                found = self._handover.reserve(chunk)
                assert found, "decode_pool_pages has room for any batch"
        return self._handover.deliver(batch)

    def hand_over(self, batch: Batch, delivery: Delivery, results: Sequence[RankResult]) -> None:
        """Have the complete prompts of `batch`, which has run and is delivered, decoded."""
        transfers = [result.transfer for result in results if result.transfer]
        record = TransferRecord(
            num_pages=len(delivery.src_pages),
            num_blocks=sum(transfer.num_blocks for transfer in transfers),
            num_bytes=sum(transfer.num_bytes for transfer in transfers),
            plan_seconds=max(transfer.plan_seconds for transfer in transfers),
            seconds=max(transfer.seconds for transfer in transfers),
        )
        self.report.transfers.append(record)
        seconds = max(sum(result.seconds.values()) for result in results)
        for chunk in batch.chunks:
            self._prefill_seconds[chunk.request_index] += seconds
            self._transfer_seconds[chunk.request_index] += record.seconds
        self.wait()
        self._running = delivery.continuations
        if self._running:
            self._workers.call(self._decode, "decode", self._running)

    def wait(self) -> None:
        """Wait until all running requests have their tokens."""
        if not self._running:
            return
        self._record(self._workers.answers(self._decode))
        for continuation in self._running:
            self._handover.release(continuation.request_index)
        self._running = ()

    def _record(self, results: Sequence[DecodeResult]) -> None:
        """Record the results of all decode ranks, which differ only in times and bytes."""
        result, *others = results
        tokens = [request.tokens for request in result.requests]
        for rank, other in enumerate(others, start=1):
            if [request.tokens for request in other.requests] != tokens:
                raise RuntimeError(f"decode rank {rank} has other tokens than decode rank 0")
        report = self.report
        step_seconds = [max(step) for step in zip(*(r.step_seconds for r in results), strict=True)]
        report.cached_tokens = self._handover.cached_tokens
        report.num_steps += len(step_seconds)
        report.step_seconds += sum(step_seconds)
        report.peak_bytes = max(r.peak_bytes for r in results)
        report.pool_bytes = [r.pool_bytes for r in results]
        report.sent_bytes += sum(r.sent_bytes for r in results)
        for request in result.requests:
            report.requests.append(
                RequestRecord(
                    index=request.request_index,
                    tokens=request.tokens,
                    prefill_seconds=self._prefill_seconds.pop(request.request_index),
                    transfer_seconds=self._transfer_seconds.pop(request.request_index),
                    step_seconds=step_seconds[0] if len(request.tokens) > 1 else 0.0,
                )
            )
            if self._checker:
                self._checker.compare_tokens(request)


def decode_pages(options: ReplayOptions) -> int:
    """Return the number of pages in the pools of all decode processes."""
    pages = decode_pool_pages(
        options.num_pages,
        page_size=options.page_size,
        block_tokens=options.block_tokens,
        decode_tokens=options.decode_tokens,
        max_sequences=options.max_sequences,
    )
    if options.decode_ranks > 1:  # a prompt may need one page more on one rank than on another
        pages += options.max_sequences * options.decode_ranks
    return -(-pages // options.decode_ranks) * options.decode_ranks


def num_slots(options: ReplayOptions) -> int:
    """Return the slots for prompts of two batches: one is decoded while the next arrives."""
    return 2 * options.max_sequences
