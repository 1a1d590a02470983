# SPDX-License-Identifier: Apache-2.0
"""Batches for the fused inference attention operator, in any of its layouts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from support.cases import assert_attention, one_after_another

LAYOUTS = (
    *("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
    *("TND", "TND_NTD", "NTD_TND"),
)
TEMPLATE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def tables_of(lens: tuple[int, ...], block_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return tables [sequences, most + 1] of blocks in random order; one block is unused."""
    counts = [-(-n // block_size) for n in lens]
    tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
    blocks = rng.permutation(sum(counts) + 1)
    for row, count in zip(tables, counts, strict=True):
        row[:count], blocks = blocks[:count], blocks[count:]
    return tables


def padded(sequences: list[torch.Tensor], spare_rows: int, fill: float = torch.nan) -> torch.Tensor:
    """Return [B, S, ...] with `fill` after each sequence."""
    rows = max(map(len, sequences)) + spare_rows
    shape = len(sequences), rows, *sequences[0].shape[1:]
    batch = torch.full(shape, fill).to(sequences[0].dtype)
    for entry, sequence in zip(batch, sequences, strict=True):
        entry[: len(sequence)] = sequence
    return batch


def blocks_of(sequences: list[torch.Tensor], tables: np.ndarray, block_size: int) -> torch.Tensor:
    """Return [blocks, block_size, ...] with NaN in places without a token."""
    num_blocks = int((tables >= 0).sum()) + 1
    cache = torch.full((num_blocks, block_size, *sequences[0].shape[1:]), torch.nan)
    cache = cache.to(sequences[0].dtype)
    for table, sequence in zip(tables, sequences, strict=True):
        token = np.arange(len(sequence))
        cache[table[token // block_size], token % block_size] = sequence
    return cache


def ends_of(lens: tuple[int, ...], packed: bool) -> list[int]:
    """Return lengths as an operator takes them: running sums for packed sequences."""
    return [int(n) for n in (np.cumsum(lens) if packed else lens)]


def to_axes(bsnd: torch.Tensor, axes: str) -> torch.Tensor:
    """Return [B, S, N, D] in the order of `axes`, contiguous; T needs B = 1."""
    if axes == "BSH":
        return bsnd.flatten(2).contiguous()
    packed = "T" in axes
    order = ["BSND".index("S" if axis == "T" else axis) for axis in axes]
    return bsnd.permute(([0] if packed else []) + order).flatten(0, int(packed)).contiguous()


def from_axes(x: torch.Tensor, axes: str, num_heads: int) -> torch.Tensor:
    """Return the inverse of `to_axes`: [B, S, N, D]."""
    if axes == "BSH":
        return x.unflatten(2, (num_heads, -1))
    if "T" in axes:
        return x.permute(*[axes.index(axis) for axis in "TND"])[None]
    return x.permute(*[axes.index(axis) for axis in "BSND"])


def visible_keys(mode, q_len, kv_len, before=None, after=None, mask=None) -> np.ndarray:
    """Return which keys each query sees, by the operator's documentation."""
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    offset = kv_len - q_len if mode in (3, 4) else 0
    visible = np.ones((q_len, kv_len), bool)
    if mode in (2, 3):
        visible = j <= i + offset
    if mode == 4 or (mode == 0 and mask is not None):
        visible &= True if before is None else i + offset - before <= j
        visible &= True if after is None else j <= i + offset + after
    if mode in (0, 1) and mask is not None:
        visible = visible & ~mask[:q_len, :kv_len].astype(bool)
    return visible


@dataclass
class FiaBatch:
    """Sequences, and the arguments that present them to the operator in one layout.

    Rows that must not be read are NaN: queries and keys past their lengths, and blocks of no
    sequence. `blocks` is None, "H" for [blocks, block_size, H] or "N" for
    [blocks, N, block_size, D].
    """

    layout: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int = 32
    rope_dim: int = 0
    dtype: str = "float32"
    blocks: str | None = None
    block_size: int = 16
    spare_rows: int = 2  # rows of S1 and S2 beyond the longest sequence
    scale: float = 0.25
    queries: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.standard_normal(shape)).to(self.torch_dtype)

        width = self.head_dim + self.rope_dim
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            self.queries.append(random(q_len, self.num_heads, width))
            self.keys.append(random(kv_len, self.num_kv_heads, width))
            self.values.append(random(kv_len, self.num_kv_heads, self.v_head_dim))
        self.tables = tables_of(self.kv_lens, self.block_size, rng)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def packed(self) -> bool:
        return "T" in self.layout

    def _batch(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """Return [B, S, N, D] with NaN after each sequence, or packed sequences."""
        if self.packed:
            return torch.cat(sequences)[None]
        return padded(sequences, self.spare_rows)

    def _cache(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        cache = blocks_of(sequences, self.tables, self.block_size)
        return cache.flatten(2) if self.blocks == "H" else cache.transpose(1, 2).contiguous()

    def arguments(self, **changes: Any) -> dict[str, Any]:
        axes = self.layout.split("_")[0]

        def keys(sequences: list[torch.Tensor]) -> torch.Tensor:
            return self._cache(sequences) if self.blocks else to_axes(self._batch(sequences), axes)

        nope, rope = slice(0, self.head_dim), slice(self.head_dim, None)
        query = to_axes(self._batch([q[..., nope] for q in self.queries]), axes)
        arguments = {"query": query, "key": keys([k[..., nope] for k in self.keys])}
        arguments |= {"value": keys(self.values), "scale": self.scale, "input_layout": self.layout}
        arguments |= {"num_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads}
        packed = self.packed, self.packed and not self.blocks
        arguments["actual_seq_lengths"] = ends_of(self.q_lens, packed[0])
        arguments["actual_seq_lengths_kv"] = ends_of(self.kv_lens, packed[1])
        if self.rope_dim:
            ropes = self._batch([q[..., rope] for q in self.queries])
            arguments["query_rope"] = to_axes(ropes, axes)
            arguments["key_rope"] = keys([k[..., rope] for k in self.keys])
        if self.blocks:
            arguments |= {"block_table": self.tables, "block_size": self.block_size}
        return arguments | changes

    def check(
        self, result, mode=0, before=None, after=None, masks=None, lse=True, rounds_values=False
    ) -> None:
        """Compare the operator's result with the oracle; `masks` has one for each sequence."""
        out, lse_out = result
        out_axes = self.layout.split("_")[-1]
        out = from_axes(out, out_axes, self.num_heads)
        if lse:
            lse_out = from_axes(lse_out, "TND" if self.packed else "BNSD", self.num_heads)
        row = 0
        for b, (q, k, v) in enumerate(zip(self.queries, self.keys, self.values, strict=True)):
            mask = None if masks is None else masks[b]
            visible = visible_keys(mode, len(q), len(k), before, after, mask)
            rows = (0, slice(row, row + len(q))) if self.packed else (b, slice(0, len(q)))
            row += len(q)
            options = {"custom_mask": np.ascontiguousarray(visible).ravel(), "causal": False}
            options["scale"] = self.scale
            inputs = one_after_another(q, k, v, [len(q)], [len(k)], **options)
            lse_of_rows = lse_out[rows][..., 0] if lse else None
            assert_attention(out[rows], lse_of_rows, inputs, rounds_values=rounds_values)
            if not self.packed:  # rows past the sequence
                assert torch.all(out[b, len(q) :] == 0)
                assert not lse or torch.all(torch.isneginf(lse_out[b, len(q) :]))
