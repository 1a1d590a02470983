# SPDX-License-Identifier: Apache-2.0
"""The tensors of a workload: made once, mapped by every contender from the same files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.attention.workloads import Workload, starts

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Batch:
    """Sequences of equal lengths, which a dense engine takes in one call."""

    sequences: slice
    rows: slice  # of the queries
    size: int
    new: int
    prefix: int

    @property
    def length(self) -> int:
        return self.new + self.prefix


@dataclass(frozen=True)
class Inputs:
    """q [T, Hq, D], caches [pages, page_size, Hk, D or Dv], block_tables int32 [B, max_pages]."""

    work: Workload
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor

    def batches(self) -> list[Batch]:
        """All sequences at once if they are alike, else one by one."""
        new, prefix = self.work.new, self.work.prefix
        if len(set(zip(new, prefix, strict=True))) == 1:
            return [Batch(slice(None), slice(None), len(new), new[0], prefix[0])]
        return [
            Batch(slice(i, i + 1), slice(*rows), 1, new[i], prefix[i])
            for i, rows in enumerate(starts(new))
        ]

    def queries(self, batch: Batch) -> torch.Tensor:
        """[size, Hq, new, D], a view."""
        return self.q[batch.rows].unflatten(0, (batch.size, batch.new)).transpose(1, 2)

    def gather(self) -> Pairs:
        """Keys and values of each batch out of their pages, [size, Hk, length, D]."""
        batches = self.batches()
        if self.work.cp:  # the blocks of a rank see beginnings of one sequence
            *_, longest = sorted(batches, key=lambda batch: batch.length)
            k, v = self._gathered(longest)
            return [(k[:, :, : b.length], v[:, :, : b.length]) for b in batches]
        return [self._gathered(batch) for batch in batches]

    def _gathered(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pages = -(-batch.length // self.work.page_size)
        table = self.block_tables[batch.sequences, :pages].long()
        k, v = (  # the rows of a head side by side: torch's kernels are faster on them
            cache.permute(2, 0, 1, 3)[:, table].flatten(2, 3)[:, :, : batch.length].transpose(0, 1)
            for cache in (self.k_cache, self.v_cache)
        )
        return k, v

    def masks(self) -> list[torch.Tensor | None]:
        """What each batch may see, bool [new, length]; None where that is everything."""
        return [
            None
            if batch.new == 1 and self.work.window is None
            else visible(batch, self.work.window)
            for batch in self.batches()
        ]

    def assemble(self, outputs: Iterator[torch.Tensor]) -> torch.Tensor:
        """[T, Hq, Dv] from the [size, Hq, new, Dv] of each batch."""
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])


def visible(batch: Batch, window: int | None) -> torch.Tensor:
    mask = torch.ones(batch.new, batch.length, dtype=torch.bool).tril(batch.prefix)
    return mask if window is None else mask.triu(batch.prefix - window)


def make(work: Workload, folder: Path) -> Inputs:
    """Normal random tensors and shuffled pages, in files of `folder`."""
    generator = torch.Generator().manual_seed(0)
    pages = [-(-length // work.page_size) for length in work.kv_lens]
    if work.cp:
        order = torch.randperm(-(-work.cached // work.page_size), generator=generator).int()
        tables = order.expand(len(pages), -1).contiguous()
    else:
        tables = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
        order = torch.randperm(sum(pages), generator=generator).int()
        for row, (begin, end) in enumerate(starts(pages)):
            tables[row, : end - begin] = order[begin:end]
    (folder / "shape").write_text(" ".join(map(str, (*tables.shape, len(order)))))
    inputs = _mapped(work, folder, tables.shape, len(order))
    inputs.block_tables.copy_(tables)
    for tensor in (inputs.q, inputs.k_cache, *(() if work.latent else (inputs.v_cache,))):
        flat = tensor.view(-1)
        for part in flat.split(1 << 24):  # in parts: float32 on the way
            part.copy_(torch.randn(len(part), generator=generator))
    return inputs


def load(work: Workload, folder: Path) -> Inputs:
    """A private copy of what `make` made."""
    *table, num_pages = map(int, (folder / "shape").read_text().split())
    mapped = _mapped(work, folder, table, num_pages)
    k_cache = mapped.k_cache.clone()
    v_cache = k_cache[..., : work.v_head_dim] if work.latent else mapped.v_cache.clone()
    return Inputs(work, mapped.q.clone(), k_cache, v_cache, mapped.block_tables.clone())


def _mapped(work: Workload, folder: Path, table: Sequence[int], num_pages: int) -> Inputs:
    dtype = getattr(torch, work.dtype)
    cache = (num_pages, work.page_size, work.num_kv_heads)
    k_cache = _file(folder / "k", (*cache, work.head_dim), dtype)
    return Inputs(
        work,
        _file(folder / "q", (sum(work.new), work.num_heads, work.head_dim), dtype),
        k_cache,
        k_cache[..., : work.v_head_dim]
        if work.latent
        else _file(folder / "v", (*cache, work.v_head_dim), dtype),
        _file(folder / "tables", table, torch.int32),
    )


def output(work: Workload, path: Path) -> torch.Tensor:
    """The result of one contender, [T, Hq, Dv] in the workload's dtype, in a file."""
    shape = (sum(work.new), work.num_heads, work.v_head_dim)
    return _file(path, shape, getattr(torch, work.dtype))


def _file(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
