# SPDX-License-Identifier: Apache-2.0
"""Requests of an engine in progress, and their batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....distributed import ContextParallel
from ....scheduling import Batch, PrefixCache, Request, Scheduler, hash_blocks
from .batches import Batches
from .layers import ENGINE
from .sequences import NewToken, Sequence


class Requests:
    """Calls of `ContextParallelModel` on requests, with tokens chosen here or by the caller."""

    model: Any
    cp: ContextParallel
    cache: PrefixCache
    hit_tokens: int
    _cache_options: dict[str, int]
    _scheduler_options: dict[str, int]
    _scheduler: Scheduler
    _batches: Batches
    _sequences: dict[int, Sequence]
    _num_requests: int

    def step(self) -> list[NewToken]:
        """Compute one batch: a token of each running request, and chunks of waiting prompts.

        Returns
        -------
        list of NewToken
            New tokens, the same on every rank; empty if the batch ends no prompt, or without
            requests.

        Raises
        ------
        ValueError
            If prompts wait for pages that requests of ``prefill`` hold.
        RuntimeError
            As for ``generate``; also if ranks have different requests.
        """
        ready = [n for n, sequence in self._sequences.items() if sequence.is_ready]
        batch = self._scheduler.next_batch(n for n in ready if self._sequences[n].chooser)
        if batch is None:
            if any(s.chooser for s in self._sequences.values()):
                raise self._others_hold("step")
            return []
        return self._compute(batch)[0]

    def progress(self) -> dict[int, tuple[int, int]]:
        """Return for each request the number of computed prompt tokens, and of all. Local."""
        return {
            number: (min(s.num_computed, s.num_prompt_tokens), s.num_prompt_tokens)
            for number, s in self._sequences.items()
        }

    def free(self, requests: Iterable[int]) -> None:
        """End requests, at any time, and send nothing; their pages stay cached until needed.

        Numbers of ended requests are ignored.
        """
        for number in list(requests):
            sequence = self._sequences.pop(number, None)
            if sequence is not None:
                written, size = sequence.num_computed, self.cp.page_size
                hash_ids = hash_blocks(sequence.tokens[: written // size * size], size)
                self._scheduler.end(number, written=written, hash_ids=hash_ids)

    def _begin(self) -> None:
        """Start without requests, and with empty pools."""
        self.cache = PrefixCache(**self._cache_options)
        self._scheduler = Scheduler(self.cache, **self._scheduler_options, function=ENGINE)
        self._sequences = {}

    @property
    def _vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def _check_pages(self, call: str, *lengths: int, held: int = 0) -> None:
        """Refuse sequences of these lengths that do not fit beside `held` pages."""
        needed = sum(map(self.cache.pages_needed, lengths))
        if (missing := needed + held - self.cache.num_pages) > 0:
            raise ValueError(
                f"{ENGINE}.{call}: {sum(lengths)} tokens of prompts and behind them need {needed} "
                f"pages of {self.cp.page_size}, and of {self.cache.num_pages} are "
                f"{self.cache.num_pages - held} there: {missing} pages are missing; give "
                f"{ENGINE} num_pages={needed + held}, or shorter prompts or max_new_tokens"
            )

    def _others_hold(self, call: str) -> ValueError:
        return ValueError(
            f"{ENGINE}.{call}: requests of prefill hold the pages or places that others wait for; "
            "free some, or give more num_pages or max_sequences"
        )

    def _refuse_others(self, call: str) -> None:
        if any(sequence.chooser for sequence in self._sequences.values()):
            raise ValueError(
                f"{ENGINE}.{call}: no requests of submit may be under way, step until they are done"
            )

    def _add(self, sequence: Sequence) -> int:
        number = self._num_requests
        self._num_requests += 1
        self._sequences[number] = sequence
        count = len(sequence.tokens)
        reserve = sequence.max_new_tokens - (1 if sequence.chooser else 0)
        hashes = hash_blocks(sequence.tokens, self.cp.page_size)
        self._scheduler.add(number, Request(0, count, reserve, hashes), reserve=reserve)
        return number

    def _rows(self, logits: dict[int, Tensor], numbers: Iterable[int]) -> Tensor:
        """Return logits of requests, a row for each; float [requests, vocab_size]."""
        rows = [logits[number] for number in numbers]
        return (
            torch.stack(rows) if rows else torch.empty(0, self._vocab_size, dtype=self.model.dtype)
        )

    def _compute(self, batch: Batch) -> tuple[list[NewToken], dict[int, Tensor]]:
        """Run a batch; return the chosen tokens, or the logits for the caller."""
        numbers = [chunk.request_index for chunk in batch.chunks]
        sequences = [self._sequences[number] for number in numbers]
        try:
            logits = self._batches.logits(batch, sequences)
            for chunk, sequence in zip(batch.chunks, sequences, strict=True):
                if chunk.is_first:
                    self.hit_tokens += chunk.begin
                sequence.num_computed = chunk.end
            ended = [n for n, chunk in zip(numbers, batch.chunks, strict=True) if chunk.has_next]
            if not ended:
                return [], {}
            chosen = [self._sequences[number] for number in ended]
            if chosen[0].chooser is None:
                return [], dict(zip(ended, self._batches.all_rows(logits), strict=True))
            choices = self._batches.choices(logits, chosen)
        except BaseException:
            self._begin()  # others may learn of it in the next pass: all restart alike
            raise
        new = []
        for number, sequence, (token, logprob, last) in zip(ended, chosen, choices, strict=True):
            sequence.append(token)
            new.append(NewToken(number, token, logprob, last or sequence.is_full))
        self.free(one.request for one in new if one.finished)
        return new, {}
