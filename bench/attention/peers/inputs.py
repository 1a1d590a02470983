# SPDX-License-Identifier: Apache-2.0
"""The tensors of a workload: made once, mapped by every contender from the same files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.attention.workloads import Workload, starts

PART = 1 << 24  # random numbers at a time
#: Of codes with one scale. Powers of two, so that the values are exact in bfloat16, and an engine
#: that makes codes of them makes the same. The largest of 10^9 normal numbers is 6.1.
SCALES = {"float8_e4m3fn": 1 / 64, "float8_e5m2": 1 / 64, "int8": 1 / 16}
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
    """q [T, Hq, D], caches [pages, page_size, Hk, D or Dv], block_tables int32 [B, max_pages].

    Scales of 8-bit caches have one element, or are [pages, page_size, Hk]: value = code * scale.
    """

    work: Workload
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def slopes(self) -> torch.Tensor | None:
        """ALiBi's, float32 [Hq]."""
        return None if self.work.slopes is None else torch.tensor(self.work.slopes)

    def tokens(
        self, sequence: int, begin: int, end: int, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some tokens of a sequence, [end - begin, Hk, D].

        Codes of 8-bit caches become numbers in `dtype`, or the dtype of the queries.
        """
        size = self.work.page_size
        first = begin // size
        pages = self.block_tables[sequence, first : -(-end // size)].long()
        wanted = slice(begin - first * size, end - first * size)
        k, v = (
            values(cache, scale, pages, dtype or self.q.dtype).flatten(0, 1)[wanted]
            for cache, scale in ((self.k_cache, self.k_scale), (self.v_cache, self.v_scale))
        )
        return k, v

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
        """The mask of each batch; None if all is visible.

        bool [new, length], or ALiBi's numbers [num_heads, new, length] of the dtype of q.
        """
        if self.slopes is not None:
            numbers = (biases(batch, self.work, self.slopes) for batch in self.batches())
            return [x.to(self.q.dtype) for x in numbers]
        return [
            None if batch.new == 1 and self.work.window is None else visible(batch, self.work)
            for batch in self.batches()
        ]

    def assemble(self, outputs: Iterator[torch.Tensor]) -> torch.Tensor:
        """[T, Hq, Dv] from the [size, Hq, new, Dv] of each batch."""
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])


def visible(batch: Batch, work: Workload) -> torch.Tensor:
    mask = torch.ones(batch.new, batch.length, dtype=torch.bool).tril(batch.prefix + work.behind)
    return mask if work.window is None else mask.triu(batch.prefix - work.window)


def biases(batch: Batch, work: Workload, slopes: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(batch.length) - torch.arange(batch.new)[:, None] - batch.prefix
    return (slopes[:, None, None] * distance).masked_fill(~visible(batch, work), -torch.inf)


def values(
    cache: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The numbers of pages of a cache."""
    if scale is None:
        return cache[pages].to(dtype)
    # 8-bit codes are gathered as bytes, for which torch has all operators.
    codes = cache.view(torch.uint8)[pages].view(cache.dtype).float()
    return (codes * (scale if scale.numel() == 1 else scale[pages].unsqueeze(-1))).to(dtype)


def make(work: Workload, folder: Path) -> Inputs:
    """Normal random tensors and shuffled pages, in files of `folder`."""
    generator = torch.Generator().manual_seed(0)
    pages = [-(-length // work.page_size) for length in work.stored_lens]
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
    numbers = Numbers(work)
    fill(inputs.q, None, numbers)
    fill(inputs.k_cache, inputs.k_scale, numbers)
    if not work.latent:
        fill(inputs.v_cache, inputs.v_scale, numbers)
    return inputs


class Numbers:
    """Normal random numbers.

    Most numbers of a large cache that several workloads query are reused in another order of rows:
    new ones would take longer than all timed work.
    """

    def __init__(self, work: Workload) -> None:
        self._generator = torch.Generator().manual_seed(1)
        self._turn = 0
        self._drawn: torch.Tensor | None = None
        if work.capacity:
            self._drawn = self.rows(PART // work.head_dim, work.head_dim)

    def rows(self, count: int, width: int) -> torch.Tensor:
        """[count, width], PART elements at most."""
        if self._drawn is None:
            return torch.randn(count, width, generator=self._generator)
        self._turn += 1
        return self._drawn.roll(37 * self._turn, 0).view(-1)[: count * width].view(count, width)


def fill(x: torch.Tensor, scale: torch.Tensor | None, numbers: Numbers) -> None:
    """Write random numbers, or the nearest codes with their scales."""
    rows = x.view(-1, x.shape[-1])
    scales = None if scale is None or scale.numel() == 1 else scale.view(-1)
    if scale is not None and scales is None:
        scale.fill_(SCALES[str(x.dtype).removeprefix("torch.")])
    step = PART // x.shape[-1]
    for begin in range(0, len(rows), step):  # in parts: float32 on the way
        part = slice(begin, min(begin + step, len(rows)))
        drawn = numbers.rows(part.stop - begin, x.shape[-1])
        if scales is not None:
            scales[part] = drawn.abs().amax(1) / torch.iinfo(x.dtype).max
            drawn = drawn / scales[part].unsqueeze(1)
        elif scale is not None:
            drawn = drawn / scale
        rows[part] = (drawn.round() if x.dtype == torch.int8 else drawn).to(x.dtype)


def load(work: Workload, folder: Path, loaded: Inputs | None = None) -> Inputs:
    """A private copy of the tensors of `make`; of the queries only if the rest is loaded."""
    files = mapped(work, folder)
    if loaded is not None:
        return replace(loaded, work=work, q=files.q.clone())
    k_cache = files.k_cache.clone()
    v_cache = k_cache[..., : work.v_head_dim] if work.latent else files.v_cache.clone()
    return replace(
        files,
        q=files.q.clone(),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=files.block_tables.clone(),
    )


def mapped(work: Workload, folder: Path) -> Inputs:
    """The tensors of `make`, read-only."""
    *table, num_pages = map(int, (folder / "shape").read_text().split())
    return _mapped(work, folder, table, num_pages)


def _mapped(work: Workload, folder: Path, table: Sequence[int], num_pages: int) -> Inputs:
    dtype, stored = getattr(torch, work.dtype), getattr(torch, work.cache_dtype)
    cache = (num_pages, work.page_size, work.num_kv_heads)
    k_cache = _file(folder / "k", (*cache, work.head_dim), stored)
    scales: list[torch.Tensor | None] = [None, None]
    if work.kv_dtype:
        shape = cache if work.kv_scale == "token" else (1,)
        scales = [_file(folder / f"{name}_scale", shape, torch.float32) for name in "kv"]
    return Inputs(
        work,
        _file(folder / "q", (sum(work.new), work.num_heads, work.head_dim), dtype),
        k_cache,
        k_cache[..., : work.v_head_dim]
        if work.latent
        else _file(folder / "v", (*cache, work.v_head_dim), stored),
        _file(folder / "tables", table, torch.int32),
        *scales,
    )


def output(work: Workload, path: Path) -> torch.Tensor:
    """The result of one contender, [T, Hq, Dv] in the workload's dtype, in a file."""
    shape = (sum(work.new), work.num_heads, work.v_head_dim)
    return _file(path, shape, getattr(torch, work.dtype))


def _file(path: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel()
    if dtype.itemsize == 1:  # mapped as bytes, for any of their meanings
        mapped = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return mapped.view(dtype).view(shape)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
