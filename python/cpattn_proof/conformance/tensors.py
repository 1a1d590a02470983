# SPDX-License-Identifier: Apache-2.0
"""Batches as torch tensors, in the operator's process."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np

from .cases import FAR_ELEMENTS, FAR_PAGES, Batch, Case, make_batch
from .forms import WrongForm
from .numbers import Array

_MAP_NORESERVE = 0x4000  # flag of Linux; Python has no name for it


class Tensors:
    """Tensors of a case, on a device.

    Attributes
    ----------
    case : Case
    q : tensor [rows, num_heads, head_dim]
    q_lens, kv_lens : list of int
    sinks, slopes : float32 tensor [num_heads] or None
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self._batch: Batch = make_batch(case)
        self._given: list[tuple[Any, Any, Any]] = []  # a tensor, a copy, and its allowed new value
        self.q = self.tensor(self._batch.q)
        self.q_lens, self.kv_lens = list(case.q_lens), list(case.kv_lens)
        self.sinks, self.slopes = (
            None if x is None else self.tensor(x, "float32")
            for x in (self._batch.sinks, self._batch.slopes)
        )

    def tensor(self, x: Array, dtype: str = "") -> Any:
        """Return an array on the device, in the dtype of the case or another."""
        import torch

        wanted = getattr(torch, dtype or self.case.dtype)
        given = torch.from_numpy(np.array(x)).to(self.device, wanted)
        self._given.append((given, given.clone(), None))
        return given

    def side_effect(self) -> tuple[str, str]:
        """Return a fault of side effects and the tensor concerned, or two empty strings."""
        for given, before, after in self._given:
            shape = f"{str(given.dtype).removeprefix('torch.')} of shape {list(given.shape)}"
            if after is None and not _same(given, before):
                return "changes-inputs", f"an argument was changed, {shape}"
            if after is not None and not _same(given, after):
                if _same(given, before):
                    return "new-keys-unwritten", f"the cache is as before, {shape}"
                return "changes-inputs", f"the cache has other rows than before and new, {shape}"
        return "", ""

    def indices(self, values: Iterable[int]) -> Any:
        """Return an int32 tensor on the device."""
        return self.tensor(np.asarray(list(values), np.int32), "int32")

    def ends(self, lengths: list[int]) -> Any:
        """Return [n + 1] from 0: begins of sequences, and the end of the last."""
        return self.indices([0, *np.cumsum(lengths, dtype=np.int64)])

    @property
    def page_counts(self) -> list[int]:
        """Number of pages of each sequence."""
        return [-(-kv_len // self.case.page_size) for kv_len in self.kv_lens]

    @property
    def block_tables(self) -> Any:
        """Block tables [batch, pages], int32."""
        return self.tensor(self._batch.block_tables + self.first_page, "int32")

    @property
    def first_page(self) -> int:
        """Number of pages before the pages of `caches` and `ragged`; 0 unless they are far."""
        case = self.case
        stride = case.page_size * case.num_kv_heads * min(case.head_dim, case.v_head_dim)
        return {0: 0, 16: FAR_PAGES, 31: FAR_ELEMENTS // stride + 1}[case.far]

    def caches(self, without_new: bool = False) -> tuple[Any, ...]:
        """Return K and V in pages; `without_new`: new tokens are still to be written."""
        return tuple(self._cache(memory, without_new) for memory in (self._batch.k, self._batch.v))

    def _cache(self, memory: Array, without_new: bool) -> Any:
        case, old = self.case, memory.copy()
        for own, q_len, kv_len in zip(self._batch.slots, self.q_lens, self.kv_lens, strict=True):
            if without_new:
                old[own[kv_len - q_len : kv_len]] = np.nan
        near, after = (self._pages(x) for x in (old, memory))
        cache = near
        if case.far:
            shape = (self.first_page + len(near), *near.shape[1:])
            cache = reserved(shape, near.dtype) if self.device == "cpu" else near.new_zeros(shape)
            cache[self.first_page :] = near
        self._given[-2:] = [
            (cache[self.first_page :], near.clone(), after if without_new else None)
        ]
        return cache

    def _pages(self, memory: Array) -> Any:
        pages = memory.reshape(-1, self.case.page_size, *memory.shape[1:])
        if self.case.kv_layout == "HND":
            pages = np.ascontiguousarray(pages.swapaxes(1, 2))
        return self.tensor(pages)

    def new(self) -> tuple[Any, Any]:
        """Return K and V of the new tokens, [rows, num_kv_heads, dim]."""
        return self._of_sequences(lambda q_len, kv_len: range(kv_len - q_len, kv_len))

    def ragged(self) -> tuple[Any, Any]:
        """Return K and V sequence after sequence, then unused rows; for pages, all their slots."""
        return self.tensor(self._batch.k), self.tensor(self._batch.v)

    def _of_sequences(self, tokens: Any) -> tuple[Any, Any]:
        slots = [
            own[list(tokens(q_len, kv_len))]
            for own, q_len, kv_len in zip(self._batch.slots, self.q_lens, self.kv_lens, strict=True)
        ]
        chosen = np.concatenate(slots)
        return self.tensor(self._batch.k[chosen]), self.tensor(self._batch.v[chosen])

    def padded(self) -> tuple[Any, Any, Any]:
        """Return Q, K and V [batch, longest, heads, dim]; queries and keys begin at 0."""
        case, batch = self.case, self._batch
        q = np.zeros((len(self.q_lens), max(self.q_lens), *batch.q.shape[1:]), np.float32)
        for s, q_len in enumerate(self.q_lens):
            q[s, :q_len] = batch.q[batch.q_starts[s] : batch.q_starts[s] + q_len]
        k, v = (x.reshape(len(case.kv_lens), -1, *x.shape[1:]) for x in (batch.k, batch.v))
        return self.tensor(q), self.tensor(k), self.tensor(v)

    def visible(self) -> Any:
        """Return the visible keys of each row of `padded`, bool [batch, rows, keys]."""
        case, (queries, keys) = self.case, (max(self.q_lens), self._batch.k.shape[0])
        keys //= len(self.kv_lens)
        sees = np.zeros((len(self.q_lens), queries, keys), bool)
        for s, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            position = kv_len - q_len + np.arange(queries)[:, None]
            key = np.arange(keys)[None, :]
            own = np.broadcast_to(key < kv_len, sees[s].shape)
            if case.causal:
                own = own & (key <= position)
            if case.window is not None:
                own = own & (key >= position - case.window)
            if case.window_right is not None:
                own = own & (key <= position + case.window_right)
            sees[s] = own
        return self.tensor(sees, "bool")

    def rows_of(self, padded: Any) -> Any:
        """Return the rows of sequences from [batch, longest, ...]."""
        import torch

        wanted = (len(self.q_lens), max(self.q_lens))
        if tuple(padded.shape[:2]) != wanted:
            raise WrongForm(
                f"out must be of {wanted[0]} sequences with {wanted[1]} rows each, "
                f"got {' and '.join(map(str, padded.shape[:2]))}"
            )
        return torch.cat([padded[s, :q_len] for s, q_len in enumerate(self.q_lens)])


def _same(given: Any, wanted: Any) -> bool:
    """Tell whether two tensors are equal, with NaN equal to NaN."""
    return bool(((given == wanted) | (given.isnan() & wanted.isnan())).all())


def reserved(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return zeros on the CPU that take memory only once touched."""
    import torch

    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)
