# SPDX-License-Identifier: Apache-2.0
"""One rank: its share of every batch, through the layers of its pipeline stage."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cpattn._core import set_num_threads
from cpattn.distributed import ContextParallel
from cpattn.transfer.layout import KVLayout

from .dense.attention import DenseAttention
from .disaggregation.endpoint import Endpoint, Peer, Transfer, start_engine
from .disaggregation.handover import Delivery
from .dsa.attention import SparseAttention
from .dsa.shards import ShardedSparseAttention
from .memory import forget_peak, peak_resident_bytes
from .messages import RankResult, Work, WorkerConfig
from .model import Decoder, Head, stage_layers
from .phases import PhaseClock

_PASS_SHARE = 0.4  # share of the pass in the time of a batch; the rest is the torch baseline
_ATTENTION: dict[tuple[str, bool], Any] = {  # keys: kind of model, and whether pools are sharded
    ("dense", False): DenseAttention,
    ("dense", True): DenseAttention,
    ("dsa", False): SparseAttention,
    ("dsa", True): ShardedSparseAttention,
}


class Rank:
    """Process with its copy of a stage's weights and its KV pools.

    Rank numbers go stage by stage. The ranks of a stage split the tokens, and each passes its
    hidden states to the rank in its place in the next stage.
    """

    def __init__(self, rank: int, config: WorkerConfig, init_method: str) -> None:
        self.tell: Callable[[str, float], None] = lambda what, share: None
        self._config = config
        self._rank = rank
        self._peak_bytes = 0
        torch.set_num_threads(config.num_threads)
        set_num_threads(config.num_threads)
        timeout = datetime.timedelta(seconds=config.timeout_seconds)
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=config.pp_size * config.cp_size,
            timeout=timeout,
        )
        group = dist.group.WORLD
        if config.pp_size > 1:
            group, _ = dist.new_subgroups(config.cp_size, timeout=timeout)
        assert group is not None
        self._cp = ContextParallel(
            group,
            strategy=config.strategy,
            weights=config.weights,
            page_size=config.page_size,
            placement=config.placement,
            exchange=config.exchange,
        )
        layers = stage_layers(config.model.num_layers, config.pp_size)[rank // config.cp_size]
        self._model = Decoder(config.model, layers)
        self._attention = _ATTENTION[config.model.kind, config.placement is not None](
            config.model, self._cp, config.num_pages, layers
        )
        self._pool_bytes = sum(
            entry.nbytes for entry in KVLayout.from_pool(self._attention.pool).entries
        )
        self._link: Endpoint | None = None
        if config.num_slots:
            self._link = Endpoint(
                start_engine(config.address), self._attention.pool, layers, config.num_slots
            )
            self._head = Head(config.model) if self._speaks else None

    @property
    def _speaks(self) -> bool:
        """Whether this rank reports the result; all ranks of the last stage have it."""
        return self._model.is_last and not self._cp.cp_rank

    def __enter__(self) -> Rank:
        if self._link:
            self._link.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._link:
            self._link.__exit__()
        dist.destroy_process_group()

    def connect(self, *peers: Peer) -> None:
        """Connect to the decode processes that receive KV."""
        assert self._link
        self._link.connect(*peers)

    @torch.inference_mode()
    def run(self, work: Work) -> RankResult:
        """Run one forward pass, then, off its clock, KV transfer and attention by the baseline."""
        cp, batch, attention = self._cp, work.batch, self._attention
        sent_bytes = cp.sent_bytes
        clock = PhaseClock(self._announcer())
        with clock("metadata"):
            plan = cp.plan(
                extend_lens=batch.extend_lens,
                seq_lens=batch.seq_lens,
                block_tables=batch.block_tables,
                out_cache_loc=batch.slots,
            )
            attention.begin(batch, plan, clock)
        positions = cp.shard(plan, torch.from_numpy(batch.positions))
        if self._model.is_first:
            x = cp.shard(plan, torch.from_numpy(work.token_ids))
        else:
            with clock("stage"):
                x = self._receive(plan.num_local_rows)
        x = self._model(x, positions, attention)
        if self._model.is_last:
            with clock("gather"):
                x = cp.gather(plan, x)
        else:
            with clock("stage"):
                self._pass_on(x)
        seconds = clock.stop(self._config.phases)
        sent_bytes = cp.sent_bytes - sent_bytes

        self._peak_bytes = max(self._peak_bytes, peak_resident_bytes())
        transfer = self._deliver(work.delivery, x) if work.delivery else None
        chosen = None
        if len(work.rows) and attention.chosen is not None:
            chosen = cp.gather(plan, attention.chosen)[torch.from_numpy(work.rows)].numpy()
        torch_seconds, difference = None, None
        if self._config.torch_baseline:
            if not cp.cp_rank:
                self.tell("torch baseline", _PASS_SHARE)
            torch_seconds, difference = attention.baseline()
            forget_peak()
        kv_lens = plan.metadata.query_cache_lengths
        return RankResult(
            seconds=seconds,
            flops=attention.flops(),
            num_rows=len(kv_lens),
            num_pairs=int(np.sum(kv_lens, dtype=np.int64)),
            peak_bytes=self._peak_bytes,
            rows=x[torch.from_numpy(work.rows)].float().numpy() if self._speaks else None,
            chosen=chosen if self._speaks else None,
            torch_seconds=torch_seconds,
            torch_difference=difference,
            transfer=transfer,
            error_over_codes=attention.error_over_codes(work.rows) if len(work.rows) else None,
            sent_bytes=sent_bytes,
            pool_bytes=self._pool_bytes,
            exchange=attention.exchange,
        )

    def _announcer(self) -> Callable[[str], None]:
        """Return a function that announces phases; one rank of a stage does it for all."""
        if self._cp.cp_rank:
            return lambda phase: None
        config, begun = self._config, 0
        stage = self._rank // config.cp_size
        expected = 2 + len(self._model.layers) * len(config.model.phases[1:-1])
        whole = _PASS_SHARE if config.torch_baseline else 1.0

        def announce(phase: str) -> None:
            nonlocal begun
            self.tell(phase, whole * (stage + min(begun / expected, 1.0)) / config.pp_size)
            begun += 1

        return announce

    def _deliver(self, delivery: Delivery, x: Tensor) -> Transfer:
        """Send this rank's pages after a batch, and the first tokens of prompts that end in it."""
        assert self._link
        is_sharded = self._config.placement is not None
        transfer = self._link.send_pages(
            delivery, self._cp.cp_rank, self._cp.cp_size, is_sharded=is_sharded
        )
        if self._head and delivery.continuations:
            slots = [c.slot for c in delivery.continuations]
            rows = x[[c.row for c in delivery.continuations]]
            self._link.first_tokens[slots, 0] = self._head(rows).argmax(dim=-1)
            self._link.send_first_tokens(slots)
        return transfer

    def _receive(self, num_rows: int) -> Tensor:
        """Receive hidden states [num_rows, hidden_size] of the previous stage."""
        model = self._config.model
        x = torch.empty(num_rows, model.hidden_size, dtype=model.torch_dtype)
        if num_rows:
            dist.recv(x, self._rank - self._config.cp_size)
        return x

    def _pass_on(self, x: Tensor) -> None:
        if len(x):
            dist.send(x, self._rank + self._config.cp_size)
