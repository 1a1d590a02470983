# SPDX-License-Identifier: Apache-2.0
"""One context-parallel rank: its part of every batch, through all layers of the decoder."""

from __future__ import annotations

import datetime
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from cpattn import set_num_threads
from cpattn.distributed import ContextParallel

from .baseline import gathered_attention, make_segments
from .model import Decoder
from .processes import Work, WorkerConfig

# gather: write_kv and the final gather, with the wait for slower ranks; rest: the decoder itself.
PHASES = ("metadata", "gather", "attention", "rest")


@dataclass(frozen=True)
class RankResult:
    """What one rank says about one batch; times in seconds."""

    seconds: dict[str, float]  # by phase; their sum is the time of the pass
    num_rows: int  # query rows of this rank
    num_pairs: int  # query-key pairs of this rank, in one head of one layer
    peak_bytes: int  # resident memory, the most so far, without the baseline's
    rows: npt.NDArray[Any] | None  # float32 [wanted rows, hidden_size], from rank 0
    torch_seconds: float | None  # attention of all layers by the baseline
    torch_difference: float | None  # largest |attention - baseline|


class Rank:
    """A process of the group, with its copy of the weights and its KV pools.

    The pools start as NaN: whatever reads a slot before it is written is found out.
    """

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
        model = config.model
        group = dist.group.WORLD
        assert group is not None
        self._cp = ContextParallel(group, strategy=config.strategy, page_size=config.page_size)
        self._model = Decoder(model)
        self._scale = model.head_dim**-0.5
        shape = (config.num_pages * config.page_size, model.num_kv_heads, model.head_dim)
        self._caches = [
            tuple(torch.full(shape, torch.nan, dtype=model.torch_dtype) for _ in range(2))
            for _ in range(model.num_layers)
        ]

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
        cp, batch = self._cp, work.batch
        seconds: dict[str, float] = defaultdict(float)
        calls: list[tuple[Tensor, Tensor]] = []  # of each layer q and the output

        @contextmanager
        def clock(phase: str) -> Iterator[None]:
            start = time.perf_counter()
            yield
            seconds[phase] += time.perf_counter() - start

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self._caches[layer]
            with clock("gather"):
                cp.write_kv(plan, k, v, k_cache, v_cache)
            with clock("attention"):
                out: Tensor = cp.attend(plan, q, k_cache, v_cache, scale=self._scale)
            if self._config.torch_baseline:
                calls.append((q, out))
            return out

        start = time.perf_counter()
        with clock("metadata"):
            plan = cp.plan(
                extend_lens=batch.extend_lens,
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                out_cache_loc=batch.slots,
            )
        token_ids = cp.shard(plan, torch.from_numpy(work.token_ids))
        positions = cp.shard(plan, torch.from_numpy(batch.positions))
        hidden = self._model(token_ids, positions, attention)
        with clock("gather"):
            hidden = cp.gather(plan, hidden)
        total = time.perf_counter() - start
        seconds["rest"] = total - sum(seconds.values())

        self._peak_bytes = max(self._peak_bytes, peak_resident_bytes())

        kv_lens = plan.metadata.query_cache_lengths
        torch_seconds, difference = self._baseline(plan, work, calls) if calls else (None, None)
        return RankResult(
            seconds={phase: seconds[phase] for phase in PHASES},
            num_rows=len(kv_lens),
            num_pairs=int(np.sum(kv_lens, dtype=np.int64)),
            peak_bytes=self._peak_bytes,
            rows=hidden[torch.from_numpy(work.rows)].float().numpy() if not self._rank else None,
            torch_seconds=torch_seconds,
            torch_difference=difference,
        )

    def _baseline(
        self, plan: Any, work: Work, calls: list[tuple[Tensor, Tensor]]
    ) -> tuple[float, float]:
        """Seconds of the same attention by torch, and how far apart the results are."""
        segments = make_segments(
            plan.metadata.query_request_indices,
            plan.metadata.query_cache_lengths,
            work.batch.block_tables,
            self._config.page_size,
            stride=self._config.cp_size if self._config.strategy == "interleave" else 1,
        )
        seconds, difference = 0.0, 0.0
        for (q, out), (k_cache, v_cache) in zip(calls, self._caches, strict=True):
            start = time.perf_counter()
            other = gathered_attention(q, k_cache, v_cache, segments, scale=self._scale)
            seconds += time.perf_counter() - start
            if len(out):
                difference = max(difference, float((out - other).abs().max()))
        forget_peak()
        return seconds, difference


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
