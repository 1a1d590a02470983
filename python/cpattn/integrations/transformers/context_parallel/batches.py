# SPDX-License-Identifier: Apache-2.0
"""Batches of an engine: a forward pass of the model, and the use of its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....distributed import ContextParallel, ContextParallelPlan
from ....scheduling import Batch
from .layers import RunningModel
from .passes import OnEveryRank, OverRanks, OverShards, SharedOut
from .pools import Pools
from .sequences import Sequence


@dataclass(frozen=True)
class Logits:
    """Logits of a batch on this rank: of the last tokens of some sequences."""

    plan: ContextParallelPlan
    tokens: Any  # int64: tokens of the batch that predict the next token of their sequence
    mine: list[int]  # indices of the tokens of `rows`
    rows: Tensor


@dataclass(frozen=True)
class Batches:
    """Forward passes of a model on this rank."""

    model: RunningModel
    cp: ContextParallel
    pools: Pools
    shares_memory: bool

    def logits(self, batch: Batch, sequences: SequenceOf[Sequence]) -> Logits:
        """Run a batch with chunks of `sequences`."""
        with self._telling():
            attention, inputs, logits = self._planned(batch, sequences)
        with self._telling(attention):
            return logits(self.model.logits(attention, *inputs))

    def _planned(
        self, batch: Batch, sequences: SequenceOf[Sequence]
    ) -> tuple[OverRanks | OnEveryRank, tuple[Tensor, Tensor, Tensor], Callable[[Tensor], Logits]]:
        """Return a pass for a batch, inputs of the model, and what its result becomes. Local."""
        known = [s.tokens[c.begin : c.end] for s, c in zip(sequences, batch.chunks, strict=True)]
        ids, positions = torch.from_numpy(np.concatenate(known)), torch.from_numpy(batch.positions)
        has_next = [chunk.has_next for chunk in batch.chunks]
        tokens = np.cumsum(batch.extend_lens)[has_next] - 1
        numbers = torch.full((batch.num_tokens,), -1)
        numbers[tokens] = torch.arange(len(tokens))
        plan = self.cp.plan(
            batch.extend_lens,
            batch.seq_lens,
            block_tables=batch.block_tables,
            out_cache_loc=batch.slots,
        )
        own = self.cp.shard(plan, numbers)
        keep = torch.nonzero(own >= 0)[:, 0]
        mine = own[keep]
        attention: OverRanks | OnEveryRank
        if self.shares_memory or any(c.begin < c.request.input_length for c in batch.chunks):
            attention = SharedOut(self.cp, self.pools, plan)
            ids, positions = self.cp.shard(plan, ids), self.cp.shard(plan, positions)
            if not len(ids):  # layers need a row; its results are not read
                ids = positions = torch.zeros(1, dtype=torch.int64)
        else:
            keep = mine
            if self.cp.placement is None:
                attention = OnEveryRank(self.pools, batch)
            else:
                attention = OverShards(self.cp, self.pools, batch)
        return attention, (ids, positions, keep), partial(Logits, plan, tokens, mine.tolist())

    def all_rows(self, logits: Logits) -> Tensor:
        """Exchange logits; return a row for each of `Logits.tokens`."""
        return self.cp.gather(logits.plan, logits.rows, tokens=logits.tokens)

    def choices(
        self, logits: Logits, sequences: SequenceOf[Sequence]
    ) -> list[tuple[int, float, bool]]:
        """Choose the next token of each sequence, on the rank with its logits, for all ranks.

        `sequences` are those with a next token, in the order of `Logits.tokens`.
        """
        chosen = np.empty((len(logits.mine), 3))
        with self._telling():
            for row, number in enumerate(logits.mine):
                sequence = sequences[number]
                assert sequence.chooser is not None
                chosen[row] = sequence.chooser.choose(sequence.tokens, logits.rows[row])
        told = self.cp.gather(logits.plan, torch.from_numpy(chosen), tokens=logits.tokens)
        return [(int(token), logprob, bool(last)) for token, logprob, last in told.tolist()]

    @contextmanager
    def _telling(self, attention: OverRanks | OnEveryRank | None = None) -> Iterator[None]:
        """Run steps of this rank alone; tell other ranks of an error, as they would wait."""
        try:
            yield
        except Exception as error:
            if attention is None or not attention.all_know:
                with suppress(Exception), self.cp.agreement():
                    raise error
            raise
