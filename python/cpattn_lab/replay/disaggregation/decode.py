# SPDX-License-Identifier: Apache-2.0
"""Decode process: all layers over its own pool, which prefill ranks write.

If there are several, they are ranks with a share of the pages each, and compute equal tokens.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from cpattn._core import set_num_threads
from cpattn.distributed import ContextParallel
from cpattn.kv import PageInterleave
from cpattn.transfer.engine import TransferEngine
from cpattn.transfer.layout import KVLayout

from ..dense.attention import make_pool as make_dense_pool
from ..dense.decode import DecodeAttention, ShardedDecodeAttention
from ..dsa.decode import SparseDecodeAttention
from ..dsa.pools import make_pool as make_sparse_pool
from ..memory import peak_resident_bytes
from ..model import Decoder, DecoderConfig, Head
from .endpoint import Endpoint, Peer, start_engine
from .handover import Continuation


@dataclass(frozen=True)
class DecodeConfig:
    """Configuration that the decode process gets once."""

    model: DecoderConfig
    page_size: int
    num_pages: int
    num_slots: int
    num_threads: int
    num_ranks: int = 1  # ranks that share out the pages; `num_pages` are the pages of one
    timeout_seconds: float = 300.0
    address: str = "127.0.0.1"  # address of this process's host


@dataclass(frozen=True)
class Continued:
    """Decoded tokens of one request."""

    request_index: int
    tokens: list[int]  # the first one is prefill's
    hidden: npt.NDArray[Any]  # float32 [len(tokens) - 1, hidden_size]: one row per step
    chosen: list[npt.NDArray[Any]]  # keys of each row: int32 [topk], or [0] for dense attention


@dataclass(frozen=True)
class DecodeResult:
    """Result of decoding in one go; times in seconds."""

    requests: list[Continued]
    step_seconds: list[float]
    peak_bytes: int
    pool_bytes: int
    sent_bytes: int  # bytes to other ranks that decode


class DecodeRank:
    """Decodes all given requests greedily, as one batch.

    It is made like any worker; several decode ranks have a group of their own.
    """

    def __init__(
        self,
        rank: int,
        config: DecodeConfig,
        init_method: str,
        engine: TransferEngine | None = None,
    ) -> None:
        torch.set_num_threads(config.num_threads)
        set_num_threads(config.num_threads)
        layers = range(config.model.num_layers)
        self._config = config
        self._cp = _decode_group(rank, config, init_method) if config.num_ranks > 1 else None
        make_pool, self._make_attention = _MODELS[config.model.kind]
        self._pool = make_pool(config.model, config.num_pages, config.page_size, layers)
        self._model = Decoder(config.model)
        self._head = Head(config.model)
        engine = engine or start_engine(config.address)
        self._link = Endpoint(engine, self._pool, layers, config.num_slots)
        self._pool_bytes = sum(entry.nbytes for entry in KVLayout.from_pool(self._pool).entries)

    def __enter__(self) -> DecodeRank:
        self._link.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._link.__exit__()
        if self._cp:
            dist.destroy_process_group()

    def peer(self) -> Peer:
        """Return the peer for prefill ranks."""
        return self._link.peer()

    @torch.inference_mode()
    def decode(self, continuations: tuple[Continuation, ...]) -> DecodeResult:
        """Decode all requests to their ends; their prompts are in the pool."""
        first = self._link.first_tokens
        sent_bytes = self._sent_bytes
        tokens = {c.request_index: [int(first[c.slot, 0])] for c in continuations}
        hidden: dict[int, list[Any]] = {c.request_index: [] for c in continuations}
        chosen: dict[int, list[Any]] = {c.request_index: [] for c in continuations}
        step_seconds: list[float] = []
        while running := [c for c in continuations if len(tokens[c.request_index]) < c.num_tokens]:
            begin = time.perf_counter()
            rows, keys = self._step(running, [tokens[c.request_index] for c in running])
            best = self._head(rows).argmax(dim=-1).tolist()
            for c, row, row_keys, token in zip(running, rows, keys, best, strict=True):
                hidden[c.request_index].append(row.float().numpy())
                chosen[c.request_index].append(row_keys.numpy())
                tokens[c.request_index].append(token)
            step_seconds.append(time.perf_counter() - begin)
        width = self._config.model.hidden_size
        requests = [
            Continued(i, tokens[i], np.array(rows, np.float32).reshape(-1, width), chosen[i])
            for i, rows in hidden.items()
        ]
        return DecodeResult(
            requests,
            step_seconds,
            peak_resident_bytes(),
            self._pool_bytes,
            self._sent_bytes - sent_bytes,
        )

    @property
    def _sent_bytes(self) -> int:
        return self._cp.sent_bytes if self._cp else 0

    def _step(self, running: list[Continuation], tokens: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return hidden states [len(running), hidden_size] of last tokens, and chosen keys."""
        page_size = self._config.page_size
        position = np.array(
            [c.prompt_tokens + len(t) - 1 for c, t in zip(running, tokens, strict=True)]
        )
        width = int(position.max()) // page_size + 1
        tables = np.zeros((len(running), width), np.int32)
        for row, c in zip(tables, running, strict=True):
            row[: len(c.page_ids)] = c.page_ids[:width]
        page = tables[np.arange(len(running)), position // page_size].astype(np.int64)
        slots = page * page_size + position % page_size
        attention: Any
        if self._cp:
            model: Any = self._config.model
            attention = ShardedDecodeAttention(
                model, self._cp, self._pool, tables, position + 1, slots
            )
        else:
            attention = self._make_attention(
                self._config.model, self._pool, tables, position + 1, slots
            )
        last = torch.tensor([t[-1] for t in tokens])
        out: Tensor = self._model(last, torch.from_numpy(position), attention)
        return out, attention.chosen


def _decode_group(rank: int, config: DecodeConfig, init_method: str) -> ContextParallel:
    """Join the group of the decode ranks, which is separate from the group of prefill ranks."""
    dist.init_process_group(
        "gloo",
        init_method=f"{init_method}-decode",
        rank=rank,
        world_size=config.num_ranks,
        timeout=datetime.timedelta(seconds=config.timeout_seconds),
    )
    group = dist.group.WORLD
    assert group is not None
    placement = PageInterleave(shard_size=config.num_ranks, page_size=config.page_size)
    return ContextParallel(group, page_size=config.page_size, placement=placement)


# Functions that make the pool and the attention of a step, by kind of model.
_MODELS: dict[str, tuple[Any, Any]] = {
    "dense": (make_dense_pool, DecodeAttention),
    "dsa": (make_sparse_pool, SparseDecodeAttention),
}
