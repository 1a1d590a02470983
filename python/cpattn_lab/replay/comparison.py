# SPDX-License-Identifier: Apache-2.0
"""Comparison with replicated pools: savings of sharded pools, and equality of results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cpattn.context_parallel.placement_name import REPLICATED
from cpattn.scheduling.scheduler import Batch

from .records import ReplayOptions, ReplayReport, ReplicatedRecord


class SampledRows:
    """Final hidden states of the compared rows, by request and position."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    def add(
        self, batch: Batch, rows: npt.NDArray[np.int64], hidden: npt.NDArray[np.float32]
    ) -> None:
        """Add the hidden states [len(rows), hidden_size] of some rows of a batch."""
        requests = np.repeat([c.request_index for c in batch.chunks], batch.extend_lens)[rows]
        keys = zip(requests.tolist(), batch.positions[rows].tolist(), strict=True)
        self.of.update(zip(keys, hidden, strict=True))

    def difference(self, other: SampledRows) -> tuple[int, float]:
        """Return the number of common rows, each prompt's last included, and their distance."""
        common = self.of.keys() & other.of.keys()
        differences = [float(np.abs(self.of[key] - other.of[key]).max()) for key in common]
        return len(common), max((np.inf if np.isnan(d) else d for d in differences), default=0.0)


def replicated(options: ReplayOptions) -> ReplayOptions:
    """Return options of the replay with replicated pools, without side measurements."""
    return replace(
        options,
        placement=REPLICATED,
        exchange="auto",
        torch_baseline=False,
        decode_tokens=0,
        decode_ranks=1,
    )


def compared(rows: SampledRows, other: ReplayReport, other_rows: SampledRows) -> ReplicatedRecord:
    """Return the record of a replay with `replicated` options."""
    num_rows, difference = rows.difference(other_rows)
    return ReplicatedRecord(
        run_seconds=other.run_seconds,
        new_tokens=other.new_tokens,
        pool_bytes=max(other.pool_bytes),
        peak_bytes=max(other.peak_bytes),
        sent_bytes=sum(sum(batch.rank_sent_bytes) for batch in other.batches),
        compared_rows=num_rows,
        difference=difference,
    )
