# SPDX-License-Identifier: Apache-2.0
"""Owners of the pages of the KV pool: prompts share the pages of equal leading blocks."""

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

# What a block is found by: the block before it (0: none), its hash, and its number of tokens. With
# the parent in it, equal hashes behind different prefixes are different blocks, as their K/V are.
# A block without a hash (None) is not found.
_Key = tuple[int, int | None, int]


@dataclass(eq=False)
class Block:
    """The K/V of some tokens behind one fixed prefix, in pages of its own.

    Attributes
    ----------
    serial : int
        Its number among all blocks of a cache, from 1.
    key : tuple of int
        The block before it (0: none), its hash, or None for a block that no other prompt may have,
        and its number of tokens.
    page_ids : tuple of int
    users : int
        Leases that hold it; only an idle block may be evicted.

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
    """The pages of one prompt, its own until released.

    Attributes
    ----------
    blocks : tuple of Block
    cached_tokens : int
        Leading tokens whose K/V were there already.

    Examples
    --------
    >>> lease = PrefixCache(8, page_size=4, block_tokens=8).acquire([7, 3], 10)
    >>> lease.page_ids, lease.cached_tokens
    (array([1, 2, 3], dtype=int32), 0)
    """

    blocks: tuple[Block, ...]
    cached_tokens: int  # leading tokens whose K/V were there already

    @cached_property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """Pages in the order of the prompt: position p lives in entry p // page_size."""
        pages = np.array(pages_of(self.blocks), dtype=np.int32)
        pages.flags.writeable = False
        return pages


class PrefixCache:
    """Pages 1 ... `num_pages` of a pool, by hash block, evicted least recently used first.

    Page 0 is where engines write padded tokens, so that it is nobody's.

    A block is found by later prompts from the moment it is acquired, before its K/V exist: the
    prefill that acquired it writes them, layer by layer, before any query attends. Hence the hits
    depend on the order of the prompts alone, not on how they are batched.

    A block becomes idle when its last lease is released, the blocks of a prompt from last to
    first, so that a block is never evicted before those behind it: what is cached is always a
    prefix.

    Parameters
    ----------
    num_pages : int
        Pages of the pool beside page 0.
    page_size : int
        Tokens of a page.
    block_tokens : int
        Tokens that one hash stands for, a multiple of `page_size`.
    shard_size : int
        Ranks that share the pool by pages, as `cpattn.kv.PageInterleave` has it; `num_pages` are
        those of all ranks, a multiple of it. From two on they are the pages from `shard_size` on,
        behind page 0 of each rank, and those of a prompt lie on the ranks in turn
        (`cpattn.kv.StripedAllocator`).

    Raises
    ------
    TypeError, ValueError
        For sizes that are no integers, below 1, or do not fit each other.

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
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            check_integer("PrefixCache", name, value)
        check_integer("PrefixCache", "block_tokens", block_tokens)
        check_integer("PrefixCache", "shard_size", shard_size)
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
        """Pages that no block holds."""
        return self._pages.num_free()

    @property
    def num_idle_pages(self) -> int:
        """Pages of blocks that no lease holds: cached, and free for the taking."""
        return sum(len(block.page_ids) for block in self._idle.values())

    def pages_needed(self, num_tokens: int) -> int:
        """Pages of a prompt of `num_tokens`."""
        return -(-num_tokens // self.page_size)

    def acquire(self, hash_ids: Sequence[int | None], num_tokens: int) -> Lease | None:
        """Lease the pages of a prompt, shared as far as its leading blocks are cached.

        A block whose id is None is found by nobody else, as of tokens that are not known yet.
        None if other leases hold too many pages: try again after a release. ValueError if the
        pool is too small even when empty, and unless there is an id for each block of the prompt.
        """
        if self.pages_needed(num_tokens) > self.num_pages:
            raise ValueError(
                f"PrefixCache: a prompt of {num_tokens} tokens needs "
                f"{self.pages_needed(num_tokens)} pages of {self.page_size}, "
                f"the pool has {self.num_pages}"
            )
        num_blocks = -(-num_tokens // self.block_tokens)
        if len(hash_ids) != num_blocks:
            raise ValueError(
                f"PrefixCache: hash_ids must be {num_blocks} for a prompt of {num_tokens} tokens "
                f"in blocks of {self.block_tokens}, got {len(hash_ids)}"
            )
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
        """Give a lease back; once each. Its blocks stay cached until their pages are needed.

        Of `written` tokens alone, if K/V of the others were never written. `hash_ids` are those of
        leading blocks, by now: a block that had none is found by its own from then on.
        """
        if written is not None:
            for block in lease.blocks[written // self.block_tokens :]:
                self._forget(block)
        parent = 0
        for block, hash_id in zip(lease.blocks, hash_ids, strict=False):
            key = (parent, hash_id, block.key[2])
            if block.key[1] is None:
                if key in self._blocks:  # somebody else had the same tokens meanwhile
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
        """Have nobody find a block any more."""
        if self._blocks.get(block.key) is block:
            del self._blocks[block.key]
        block.key = (block.key[0], None, block.key[2])


def pages_of(blocks: Sequence[Block]) -> list[int]:
    """The pages of blocks, one after the other."""
    return [page for block in blocks for page in block.page_ids]
