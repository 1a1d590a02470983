# SPDX-License-Identifier: Apache-2.0
"""Disaggregated replay without separate processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cpattn
from cpattn.distributed import ContextParallel
from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.scheduler import Batch, prefill_batches
from cpattn_lab.replay.dense.attention import DenseAttention
from cpattn_lab.replay.disaggregation.check import DecodeChecker, SparseDecodeChecker
from cpattn_lab.replay.disaggregation.decode import DecodeConfig, DecodeRank
from cpattn_lab.replay.disaggregation.endpoint import Endpoint
from cpattn_lab.replay.disaggregation.handover import Handover, decode_pool_pages
from cpattn_lab.replay.dsa.attention import SparseAttention
from cpattn_lab.replay.model import Decoder, DecoderConfig, Head, stage_layers
from cpattn_lab.replay.phases import PhaseClock
from cpattn_lab.traffic.trace import block_tokens_of

BLOCK, DECODE, MAX_SEQUENCES = 8, 5, 64


@contextlib.contextmanager
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class InOneProcess(contextlib.ExitStack):
    """Runs stages one after the other and a decode rank; engines copy within the process.

    Each stage computes once, as one rank; the ranks of its group only share out the sent pages.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        pp_size: int = 1,
        cp_size: int = 1,
        page_size: int = 4,
        rows_per_chunk: int = 4,
    ) -> None:
        super().__init__()
        group = self.enter_context(one_rank())
        pages = 1000 // page_size
        sizes = {"page_size": page_size, "block_tokens": BLOCK}
        decode_pages = decode_pool_pages(
            pages, **sizes, decode_tokens=DECODE, max_sequences=MAX_SEQUENCES
        )
        self.cache = PrefixCache(pages, **sizes)
        decode_cache = PrefixCache(decode_pages, **sizes)
        self.handover = Handover(decode_cache, decode_tokens=DECODE, num_slots=MAX_SEQUENCES)
        decoding = DecodeConfig(config, page_size, decode_pages, MAX_SEQUENCES, 1)
        rank = DecodeRank(0, decoding, "", cpattn.transfer.LocalEngine())
        self.decode = self.enter_context(rank)
        sparse = config.kind == "dsa"
        make_checker = SparseDecodeChecker if sparse else DecodeChecker
        make_attention: Any = SparseAttention if sparse else DenseAttention
        self.checker = make_checker(config, block_tokens=BLOCK, rows_per_chunk=rows_per_chunk)
        self.cp = ContextParallel(group, page_size=page_size)
        self.cp_size, self.config = cp_size, config
        self.stages = [
            (
                Decoder(config, layers),
                attention := make_attention(config, self.cp, pages, layers),
                Endpoint(cpattn.transfer.LocalEngine(), attention.pool, layers, MAX_SEQUENCES),
            )
            for layers in stage_layers(config.num_layers, pp_size)
        ]
        self.head = Head(config)
        self.num_bytes = 0
        for _, _, link in self.stages:
            self.enter_context(link).connect(self.decode.peer())

    @torch.inference_mode()
    def run(
        self,
        requests: Any,
        harm: Callable[[InOneProcess], None] = lambda _: None,
        spoil: Callable[[Batch, Any], None] = lambda batch, attention: None,
    ) -> None:
        """Prefill and decode; `harm` is called before decoding, `spoil` before each prefill."""
        kinds = {"block_tokens": BLOCK, "vocab_size": self.config.vocab_size, "seed": 0}
        for batch in prefill_batches(requests, self.cache, token_budget=120):
            for chunk in batch.chunks:
                assert self.handover.reserve(chunk)
            delivery = self.handover.deliver(batch)
            chunks = batch.chunks
            tokens = [block_tokens_of(c.request, c.begin, c.end, **kinds) for c in chunks]
            plan = self.cp.plan(
                batch.extend_lens,
                batch.seq_lens,
                block_tables=batch.block_tables,
                out_cache_loc=batch.slots,
            )
            x = self.cp.shard(plan, torch.from_numpy(np.concatenate(tokens)))
            positions = self.cp.shard(plan, torch.from_numpy(batch.positions))
            for model, attention, link in self.stages:
                attention.begin(batch, plan, PhaseClock())
                spoil(batch, attention)
                x = model(x, positions, attention)
                for cp_rank in range(self.cp_size):
                    self.num_bytes += link.send_pages(delivery, cp_rank, self.cp_size).num_bytes
            hidden = self.cp.gather(plan, x)
            rows = self.checker.sample_rows(batch)
            wanted = torch.from_numpy(rows)
            chosen = None
            if attention.chosen is not None:
                chosen = self.cp.gather(plan, attention.chosen)[wanted].numpy()
            self.checker.compare(batch, rows, hidden[wanted].float().numpy(), chosen)
            continuations = delivery.continuations
            if continuations:
                slots = [c.slot for c in continuations]
                first = self.head(hidden[[c.row for c in continuations]]).argmax(dim=-1)
                link.first_tokens[slots, 0] = first
                link.send_first_tokens(slots)
            harm(self)
            for request in self.decode.decode(continuations).requests:
                self.checker.compare_tokens(request)
                self.handover.release(request.request_index)
