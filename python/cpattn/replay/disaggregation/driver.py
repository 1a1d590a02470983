# SPDX-License-Identifier: Apache-2.0
"""Disaggregated serving as the driver sees it: a decode process continues what ranks prefill.

Decoding the prompts of one batch overlaps with the prefill of the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..._workers import Role, Workers
from ...traffic.prefix_cache import PrefixCache
from ...traffic.scheduler import Batch
from ..messages import RankResult
from ..records import DecodeReport, ReplayOptions, RequestRecord, TransferRecord
from .check import DecodeChecker
from .decode import DecodeConfig, DecodeResult
from .handover import Continuation, Delivery, Handover, decode_pool_pages


def decode_role(options: ReplayOptions, num_threads: int) -> Role:
    """The decode process."""
    config = DecodeConfig(
        model=options.model,
        page_size=options.page_size,
        num_pages=decode_pages(options),
        num_slots=num_slots(options),
        num_threads=num_threads,
    )
    return Role("the decode process", "cpattn.replay.disaggregation.decode.DecodeRank", 0, config)


class Disaggregation:
    """The decode process and its pool, behind the ranks of `workers`."""

    def __init__(
        self, options: ReplayOptions, workers: Workers, checker: DecodeChecker | None
    ) -> None:
        ranks = range(options.num_ranks)
        self._decode = [options.num_ranks]
        self._workers = workers
        self._checker = checker
        self._handover = Handover(
            PrefixCache(
                decode_pages(options),
                page_size=options.page_size,
                block_tokens=options.block_tokens,
            ),
            decode_tokens=options.decode_tokens,
            num_slots=num_slots(options),
        )
        self._running: tuple[Continuation, ...] = ()
        self._prefill_seconds: dict[int, float] = defaultdict(float)  # by request
        self._transfer_seconds: dict[int, float] = defaultdict(float)
        self.report = DecodeReport()
        workers.call(self._decode, "peer")
        (peer,) = workers.answers(self._decode)
        workers.call(ranks, "connect", peer)
        workers.answers(ranks)

    def prepare(self, batch: Batch) -> Delivery:
        """Find room for the prompts of `batch`, and say what to send behind it."""
        for chunk in batch.chunks:
            if not self._handover.reserve(chunk):
                self.wait()
                found = self._handover.reserve(chunk)
                assert found, "decode_pool_pages has room for any batch"
        return self._handover.deliver(batch)

    def hand_over(self, batch: Batch, delivery: Delivery, results: Sequence[RankResult]) -> None:
        """`batch` has run and is delivered: have its complete prompts decoded."""
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
        """Until all that is being decoded has its tokens."""
        if not self._running:
            return
        (result,) = self._workers.answers(self._decode)
        self._record(result)
        for continuation in self._running:
            self._handover.release(continuation.request_index)
        self._running = ()

    def _record(self, result: DecodeResult) -> None:
        report = self.report
        report.cached_tokens = self._handover.cached_tokens
        report.num_steps += len(result.step_seconds)
        report.step_seconds += sum(result.step_seconds)
        report.peak_bytes = result.peak_bytes
        for request in result.requests:
            report.requests.append(
                RequestRecord(
                    index=request.request_index,
                    tokens=request.tokens,
                    prefill_seconds=self._prefill_seconds.pop(request.request_index),
                    transfer_seconds=self._transfer_seconds.pop(request.request_index),
                    step_seconds=result.step_seconds[0] if len(request.tokens) > 1 else 0.0,
                )
            )
            if self._checker:
                self._checker.compare_tokens(request)


def decode_pages(options: ReplayOptions) -> int:
    """Pages of the decode process's pool."""
    return decode_pool_pages(
        options.pool_tokens // options.page_size,
        page_size=options.page_size,
        block_tokens=options.block_tokens,
        decode_tokens=options.decode_tokens,
        max_sequences=options.max_sequences,
    )


def num_slots(options: ReplayOptions) -> int:
    """Of prompts of one batch while those of the batch before are being decoded."""
    return 2 * options.max_sequences
