# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV pool and their owners: prompts share the pages of equal leading blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from .._limits import check_integer
from .free_pages import FreePages, StripedPool, WholePool

# Lookup key of a block: serial of the block before it (0: none), its hash, and its number of
# tokens. The predecessor tells equal hashes after different prefixes apart, as their K/V differ.
# No lookup finds a block without a hash (None).
_Key = tuple[int, int | None, int]


@dataclass(eq=False)
class Block:
    """K/V of some tokens after one fixed prefix, in pages of its own.

    Attributes
    ----------
    serial : int
        Number of the block among all blocks of a cache, from 1.
    key : tuple of int
        Serial of the block before it (0: none), its hash (None: no other prompt may share the
        block), and its number of tokens.
    page_ids : tuple of int
    users : int
        Number of leases that hold the block; only an idle block may be evicted.

    Examples
    --------
    >>> lease = PrefixCache(8, page_size=4, block_tokens=8).acquire([7], 6)
    >>> [(block.page_ids, block.users) for block in lease.blocks]
    [((1, 2), 1)]
    """

    serial: int
    key: _Key
    page_ids: tuple[int, ...]
    users: int = 0  # leases that hold it; only an idle block may be evicted


@dataclass(frozen=True)
class Lease:
    """Pages of one prompt, from `PrefixCache.acquire` until `PrefixCache.release`.

    Attributes
    ----------
    blocks : tuple of Block
    cached_tokens : int
        Leading tokens whose K/V are in the cache already.

    Examples
    --------
    >>> lease = PrefixCache(8, page_size=4, block_tokens=8).acquire([7, 3], 10)
    >>> lease.page_ids, lease.cached_tokens
    (array([1, 2, 3], dtype=int32), 0)
    """

    blocks: tuple[Block, ...]
    cached_tokens: int  # leading tokens whose K/V are in the cache already

    @cached_property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """Pages in the order of the prompt: position p lives in entry p // page_size."""
        pages = np.array(pages_of(self.blocks), dtype=np.int32)
        pages.flags.writeable = False
        return pages


class PrefixCache:
    """Cache of hash blocks in pages 1 ... `num_pages` of a pool; evicts least recently used first.

    The cache leaves out page 0, into which engines write padded tokens.

    Later prompts can share a block as soon as it is acquired, before its K/V exist: the prefill
    that acquired it writes them, layer by layer, before any query attends. Hits therefore depend
    only on the order of the prompts, not on batches.

    A block becomes idle when its last lease is released. The last block of a prompt becomes idle
    first, so eviction keeps the blocks before any cached block: the cache always holds prefixes.

    Parameters
    ----------
    num_pages : int
        Pages of the pool without page 0.
    page_size : int
        Tokens per page.
    block_tokens : int
        Tokens per hash, a multiple of `page_size`.
    shard_size : int
        Ranks that share the pool by pages, as in `cpattn.kv.PageInterleave`. `num_pages` counts the
        pages of all ranks and is a multiple of `shard_size`. With two or more ranks, pages begin at
        `shard_size`, after page 0 of each rank, and pages of a prompt lie on the ranks in turn
        (`cpattn.kv.StripedAllocator`).

    Raises
    ------
    TypeError, ValueError
        If a size is no integer or below 1, or sizes do not fit each other.

    Examples
    --------
    >>> cache = PrefixCache(8, page_size=4, block_tokens=8)
    >>> first = cache.acquire([7, 3], 12)
    >>> cache.release(first)
    >>> cache.acquire([7, 4], 12).cached_tokens, cache.num_free_pages, cache.num_idle_pages
    (8, 4, 1)
    >>> PrefixCache(8, page_size=4, block_tokens=8, shard_size=2).acquire([7, 3], 12).page_ids
    array([2, 3, 4], dtype=int32)
    """

    def __init__(
        self, num_pages: int, *, page_size: int, block_tokens: int, shard_size: int = 1
    ) -> None:
        sizes = {"num_pages": num_pages, "page_size": page_size, "block_tokens": block_tokens}
        for name, value in {**sizes, "shard_size": shard_size}.items():
            check_integer("PrefixCache", name, value)
        if block_tokens % page_size:
            raise ValueError(
                f"PrefixCache: page_size must divide the {block_tokens} tokens of a hash block, "
                f"got {page_size}"
            )
        if num_pages % shard_size:
            raise ValueError(
                f"PrefixCache: num_pages must be a multiple of shard_size {shard_size}, got "
                f"{num_pages}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.block_tokens = block_tokens
        self.shard_size = shard_size
        self.evictions = 0
        self._pages: FreePages = WholePool(num_pages)
        if shard_size > 1:
            self._pages = StripedPool(num_pages, page_size, shard_size)
        self._blocks: dict[_Key, Block] = {}
        self._idle: OrderedDict[_Key, Block] = OrderedDict()  # least recently used first
        self._serial = 0

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no block holds."""
        return self._pages.num_free()

    @property
    def num_idle_pages(self) -> int:
        """Number of pages of cached blocks that no lease holds and that may be evicted."""
        return sum(len(block.page_ids) for block in self._idle.values())

    def pages_needed(self, num_tokens: int) -> int:
        """Return the number of pages for a prompt of `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def acquire(self, hash_ids: Sequence[int | None], num_tokens: int) -> Lease | None:
        """Lease the pages of a prompt, shared as far as its leading blocks are cached.

        No other prompt finds a block with id None, for tokens that are not known yet. The result is
        None if other leases hold too many pages: try again after a release. ValueError tells that
        even an empty pool is too small, or that ids and blocks differ in number.
        """
        self._check("PrefixCache", hash_ids, num_tokens)
        cached = list(self._match(hash_ids, num_tokens))
        cached_tokens = sum(block.key[2] for block in cached)
        first, missing = len(pages_of(cached)), self.pages_needed(num_tokens - cached_tokens)
        root = cached[0].page_ids[0] if cached else None
        held = set(cached)
        idle = (b.page_ids for b in self._idle.values() if b not in held)
        if not self._pages.fits(first, missing, root, idle):
            return None
        for block in cached:
            self._hold(block)
        while (pages := self._pages.take(first, missing, root)) is None:
            self._evict()
        blocks, page_ids = cached, iter(pages)
        for i in range(len(cached), len(hash_ids)):
            size = min(self.block_tokens, num_tokens - i * self.block_tokens)
            own = tuple(islice(page_ids, self.pages_needed(size)))
            blocks.append(self._create(blocks[-1].serial if blocks else 0, hash_ids[i], size, own))
        return Lease(tuple(blocks), cached_tokens)

    def release(
        self, lease: Lease, *, written: int | None = None, hash_ids: Sequence[int] = ()
    ) -> None:
        """Give a lease back; call once per lease. Its blocks stay cached until pages are needed.

        If K/V of some tokens were never written, `written` is the number of leading tokens to
        cache. `hash_ids` are the hashes of leading blocks; they replace ids that were None.
        """
        if written is not None:
            for block in lease.blocks[written // self.block_tokens :]:
                self._forget(block)
        parent = 0
        for block, hash_id in zip(lease.blocks, hash_ids, strict=False):
            key = (parent, hash_id, block.key[2])
            if block.key[1] is None:
                if key in self._blocks:  # another prompt has cached the same tokens meanwhile
                    break
                block.key, self._blocks[key] = key, block
            parent = block.serial
        for block in reversed(lease.blocks):
            assert block.users > 0, "released twice"
            block.users -= 1
            if not block.users:
                if block.key[1] is None:
                    self._pages.give_back(block.page_ids)
                else:
                    self._idle[block.key] = block

    def _check(
        self, where: str, hash_ids: Sequence[int | None], num_tokens: int, reserve: int = 0
    ) -> None:
        """Refuse a prompt that never fits with its reserve, or whose ids are too few or many."""
        needed = self.pages_needed(num_tokens + reserve)
        if needed > self.num_pages:
            behind = f" and {reserve} behind it" if reserve else ""
            raise ValueError(
                f"{where}: a prompt of {num_tokens} tokens{behind} needs {needed} pages of "
                f"{self.page_size}, the pool has {self.num_pages}"
            )
        num_blocks = -(-num_tokens // self.block_tokens)
        if len(hash_ids) != num_blocks:
            raise ValueError(
                f"{where}: hash_ids must be {num_blocks} for a prompt of {num_tokens} tokens "
                f"in blocks of {self.block_tokens}, got {len(hash_ids)}"
            )

    def _match(self, hash_ids: Sequence[int | None], num_tokens: int) -> Iterator[Block]:
        parent = 0
        for i, hash_id in enumerate(hash_ids):
            size = min(self.block_tokens, num_tokens - i * self.block_tokens)
            block = None if hash_id is None else self._blocks.get((parent, hash_id, size))
            if block is None:
                return
            yield block
            parent = block.serial

    def _hold(self, block: Block) -> None:
        self._idle.pop(block.key, None)
        block.users += 1

    def _evict(self) -> None:
        key, block = self._idle.popitem(last=False)
        del self._blocks[key]
        self._pages.give_back(block.page_ids)
        self.evictions += 1

    def _create(
        self, parent: int, hash_id: int | None, size: int, page_ids: tuple[int, ...]
    ) -> Block:
        self._serial += 1
        block = Block(self._serial, (parent, hash_id, size), page_ids, users=1)
        if hash_id is not None:
            self._blocks[block.key] = block
        return block

    def _forget(self, block: Block) -> None:
        """Remove a block from the lookup, so that no prompt finds it."""
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        block.key = (block.key[0], None, block.key[2])


def pages_of(blocks: Sequence[Block]) -> list[int]:
    """Return the pages of blocks, one block after the other."""
    return [page for block in blocks for page in block.page_ids]
