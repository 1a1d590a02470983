# SPDX-License-Identifier: Apache-2.0
"""One context-parallel rank: its part of every batch, through all layers of the decoder."""

from __future__ import annotations

import datetime
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from cpattn import set_num_threads
from cpattn.distributed import ContextParallel

from .dense_attention import DenseAttention
from .dsa_attention import SparseAttention
from .model import Decoder
from .phases import PhaseClock
from .processes import Work, WorkerConfig

_ATTENTION: dict[str, Any] = {"dense": DenseAttention, "dsa": SparseAttention}


@dataclass(frozen=True)
class RankResult:
    """What one rank says about one batch; times in seconds."""

    seconds: dict[str, float]  # by phase; their sum is the time of the pass
    flops: dict[str, int]  # useful work of the phases that attention consists of
    num_rows: int  # query rows of this rank
    num_pairs: int  # query-key pairs of this rank, in one head of one layer
    peak_bytes: int  # resident memory, the most so far, without the baseline's
    rows: npt.NDArray[Any] | None  # float32 [wanted rows, hidden_size], from rank 0
    chosen: npt.NDArray[Any] | None  # int32 [wanted rows, topk], from rank 0 of a sparse model
    torch_seconds: dict[str, float] | None  # attention of all layers by the baseline, by phase
    torch_difference: float | None  # largest |attention - baseline|


class Rank:
    """A process of the group, with its copy of the weights and its KV pools."""

    def __init__(self, rank: int, config: WorkerConfig, init_method: str) -> None:
        self._config = config
        self._rank = rank
        self._peak_bytes = 0
        torch.set_num_threads(config.num_threads)
        set_num_threads(config.num_threads)
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=config.cp_size,
            timeout=datetime.timedelta(seconds=config.timeout_seconds),
        )
        group = dist.group.WORLD
        assert group is not None
        self._cp = ContextParallel(group, strategy=config.strategy, page_size=config.page_size)
        self._model = Decoder(config.model)
        self._attention = _ATTENTION[config.model.kind](
            config.model, self._cp, config.num_pages * config.page_size
        )

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        dist.destroy_process_group()

    @torch.inference_mode()
    def run(self, work: Work) -> RankResult:
        """One forward pass, and then, off its clock, its attention by the baseline."""
        cp, batch, attention = self._cp, work.batch, self._attention
        clock = PhaseClock()
        with clock("metadata"):
            plan = cp.plan(
                extend_lens=batch.extend_lens,
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                out_cache_loc=batch.slots,
            )
            attention.begin(batch, plan, clock)
        token_ids = cp.shard(plan, torch.from_numpy(work.token_ids))
        positions = cp.shard(plan, torch.from_numpy(batch.positions))
        hidden = self._model(token_ids, positions, attention)
        with clock("gather"):
            hidden = cp.gather(plan, hidden)
        seconds = clock.stop(self._config.model.phases)

        self._peak_bytes = max(self._peak_bytes, peak_resident_bytes())
        chosen = None
        if len(work.rows) and attention.chosen is not None:
            chosen = cp.gather(plan, attention.chosen)[torch.from_numpy(work.rows)].numpy()
        torch_seconds, difference = None, None
        if self._config.torch_baseline:
            torch_seconds, difference = attention.baseline()
            forget_peak()
        kv_lens = plan.metadata.query_cache_lengths
        return RankResult(
            seconds=seconds,
            flops=attention.flops(),
            num_rows=len(kv_lens),
            num_pairs=int(np.sum(kv_lens, dtype=np.int64)),
            peak_bytes=self._peak_bytes,
            rows=hidden[torch.from_numpy(work.rows)].float().numpy() if not self._rank else None,
            chosen=chosen if not self._rank else None,
            torch_seconds=torch_seconds,
            torch_difference=difference,
        )


def forget_peak() -> None:
    """Let `peak_resident_bytes` start again from what is held now."""
    with suppress(OSError):  # some containers do not allow it; the peak is then the whole process's
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The most memory this process has held (VmHWM, which exec resets and ru_maxrss keeps)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
