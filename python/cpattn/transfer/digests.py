# SPDX-License-Identifier: Apache-2.0
"""Digests of buffer contents, by which two sides of a transfer check that they hold the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._arguments import at_least
from .._types import Indices
from .layout import KVLayout

SCHEMA = "cpattn-kv-digest/1"


class _Buffer(NamedTuple):
    layer_id: int
    kind: str
    is_draft: bool
    dtype: str
    row_bytes: int
    num_rows: int
    sums: NDArray[np.uint64]

    @property
    def name(self) -> str:
        return f"{self.kind} of {'draft ' * self.is_draft}layer {self.layer_id}"

    @property
    def key(self) -> tuple[bool, int, str]:
        return self.is_draft, self.layer_id, self.kind


@dataclass(frozen=True)
class _Pages:
    """Pages in which one side keeps the tokens, for messages."""

    layout: KVLayout
    pages: list[int]
    start: int

    def of(self, tokens: range) -> list[int]:
        first, last = (
            self._row(token) // self.layout.page_size for token in (tokens[0], tokens[-1])
        )
        return self.pages[first : last + 1]

    def _row(self, token: int) -> int:
        size, interleave = self.layout.dcp_size, self.layout.dcp_interleave
        rounds, rest = divmod(token, size * interleave)
        own = min(max(rest - self.layout.dcp_rank * interleave, 0), interleave - 1)
        return rounds * interleave + own - self.start // size


class KVMismatch(RuntimeError):
    """The two sides hold different contents, or their digests are not comparable.

    Attributes
    ----------
    differences : tuple of str
        A sentence for each buffer: layer, kind, the tokens of the blocks that differ and, if this
        process has them, their pages.

    Examples
    --------
    >>> import numpy as np
    >>> from cpattn.transfer import KVEntry, KVLayout, KVMismatch, digest
    >>> cache = np.zeros((4, 16, 1, 8), np.float16)
    >>> layout = KVLayout([KVEntry.from_tensor(3, "k", cache)], page_size=16)
    >>> sent = digest(layout, [2, 1], block_tokens=16)
    >>> cache[1, 5] = 1
    >>> try:
    ...     digest(layout, [2, 1], block_tokens=16).check(sent)
    ... except KVMismatch as error:
    ...     print(error)
    KVDigest.check: 1 of 1 buffers differ: k of layer 3, tokens [16, 32), pages [1]
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.differences)


@dataclass(frozen=True, eq=False)
class KVDigest:
    """Digest of some tokens of a sequence on one side, buffer by buffer.

    ``+`` adds digests of ranks with different heads, tokens or layers, and gives the digest of a
    side that holds all of them. Contents that several ranks hold would count several times: of
    ranks with the same heads, add only one.

    Attributes
    ----------
    buffers : tuple of (layer_id, kind, is_draft, dtype, row_bytes, num_rows, sums)
        Fields of the `KVEntry` of a buffer, bytes and number of its rows, and a uint64 for each
        block of positions.
    first_token, num_tokens : int
        First position and number of positions of the request for this digest.
    block_tokens : int
        Positions per block: block i begins at ``i * block_tokens``.

    Examples
    --------
    >>> import numpy as np
    >>> from cpattn.transfer import KVDigest, KVEntry, KVLayout, digest
    >>> cache = np.arange(64.0).reshape(4, 4, 2, 2)
    >>> def rank(heads, **tp):
    ...     part = np.ascontiguousarray(cache[:, :, heads])
    ...     entry = KVEntry.from_tensor(0, "k", part)
    ...     layout = KVLayout([entry], page_size=4, total_kv_heads=2, **tp)
    ...     return digest(layout, [3, 0])
    >>> whole = rank(slice(2))
    >>> parts = [rank(slice(i, i + 1), tp_rank=i, tp_size=2) for i in range(2)]
    >>> parts[0] + parts[1] == whole
    True
    >>> KVDigest.from_dict(whole.to_dict()) == whole
    True
    """

    buffers: tuple[_Buffer, ...]
    first_token: int
    num_tokens: int
    block_tokens: int
    _places: _Pages | None = field(default=None, init=False, repr=False)

    def __add__(self, other: KVDigest) -> KVDigest:
        """Return the digest of both parts; ValueError if they do not fit each other."""
        if not isinstance(other, KVDigest):
            return NotImplemented
        if refused := self._apart(other):
            raise ValueError(f"KVDigest: parts must have the same {refused}")
        sums = {buffer.key: buffer for buffer in self.buffers}
        for buffer in other.buffers:
            mine = sums.get(buffer.key)
            if mine is None:
                sums[buffer.key] = buffer
                continue
            if unlike := _unlike(mine, buffer):
                raise ValueError(f"KVDigest: parts must have the same {unlike}")
            sums[buffer.key] = buffer._replace(
                num_rows=mine.num_rows + buffer.num_rows, sums=mine.sums + buffer.sums
            )
        return replace(self, buffers=tuple(sums.values()))

    def differences(self, sent: KVDigest) -> tuple[str, ...]:
        """Return a sentence for each difference that `check` would raise."""
        if not isinstance(sent, KVDigest):
            raise TypeError(
                f"KVDigest.differences: sent must be a KVDigest, got {type(sent).__name__}"
            )
        if apart := self._apart(sent):
            return (apart,)
        theirs = {buffer.key: buffer for buffer in sent.buffers}
        found = []
        for mine in self.buffers:
            other = theirs.pop(mine.key, None)
            if other is None:
                found.append(f"{mine.name} was not sent")
            elif unlike := _unlike(mine, other):
                found.append(unlike)
            elif mine.num_rows != other.num_rows:
                found.append(
                    f"{mine.name} has {mine.num_rows} rows (of a token and head) here, "
                    f"{other.num_rows} there"
                )
            elif not np.array_equal(mine.sums, other.sums):
                found.append(f"{mine.name}, {self._where(mine, other)}")
        return (*found, *(f"{other.name} is not here" for other in theirs.values()))

    def check(self, sent: KVDigest) -> None:
        """Raise `KVMismatch` unless this side holds what the peer digested as `sent`."""
        if differences := self.differences(sent):
            shown = "; ".join(differences[:4])
            rest = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
            raise KVMismatch(
                f"KVDigest.check: {len(differences)} of {len(self.buffers)} buffers differ: "
                f"{shown}{rest}",
                differences,
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types, sums as hexadecimal digits, to send to the peer."""
        return {
            "schema": SCHEMA,
            "first_token": self.first_token,
            "num_tokens": self.num_tokens,
            "block_tokens": self.block_tokens,
            "buffers": [
                [*buffer[:-1], buffer.sums.astype("<u8").tobytes().hex()]
                for buffer in sorted(self.buffers, key=lambda buffer: buffer.key)
            ],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVDigest:
        """Make a digest from its `to_dict`; ValueError for any other mapping."""
        try:
            if fields["schema"] != SCHEMA:
                raise ValueError(f"schema must be {SCHEMA}, got {fields['schema']!r:.60}")
            names = ("first_token", "num_tokens", "block_tokens")
            first, num, block = (
                _core.integer(fields[name], "KVDigest.from_dict", name) for name in names
            )
            buffers = tuple(
                _Buffer(*[*rest, np.frombuffer(bytes.fromhex(sums), "<u8").astype(np.uint64)])
                for *rest, sums in fields["buffers"]
            )
            if block < 1 or first < 0 or num < 0:
                raise ValueError(f"{', '.join(names)} must be tokens, got {first}, {num}, {block}")
            size = _num_blocks(first, num, block)
            for buffer in buffers:
                if len(buffer.sums) != size:
                    raise ValueError(f"{buffer.name} must have {size} sums")
        except Exception as error:
            raise ValueError(f"KVDigest.from_dict: fields must be of to_dict: {error}") from None
        return cls(buffers, first, num, block)

    def _apart(self, other: KVDigest) -> str:
        for name in ("block_tokens", "first_token", "num_tokens"):
            if (here := getattr(self, name)) != (there := getattr(other, name)):
                return f"{name}, {here} here and {there} there"
        return ""

    def _where(self, mine: _Buffer, other: _Buffer) -> str:
        """Name the tokens of the first blocks that differ, and their pages."""
        blocks = np.flatnonzero(mine.sums != other.sums)
        first = self.first_token // self.block_tokens + int(blocks[0])
        behind = int(np.append(np.flatnonzero(np.diff(blocks) != 1) + 1, len(blocks))[0])
        tokens = range(
            max(first * self.block_tokens, self.first_token),
            min((first + behind) * self.block_tokens, self.first_token + self.num_tokens),
        )
        text = f"tokens [{tokens.start}, {tokens.stop})"
        if self._places is not None:
            pages = self._places.of(tokens)
            text += f", pages {pages}" if len(pages) < 9 else f", pages {pages[:8]} and on"
        rest = len(blocks) - behind
        return text + (f", and {rest} more blocks" if rest else "")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVDigest):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.first_token, self.num_tokens, self.block_tokens, len(self.buffers)))


def _unlike(mine: _Buffer, other: _Buffer) -> str | None:
    """Return the first field in which buffers of one layer and kind have different numbers."""
    if mine.dtype and other.dtype and mine.dtype != other.dtype:
        return f"dtype of {mine.name}, {mine.dtype} here and {other.dtype} there"
    if mine.row_bytes != other.row_bytes:
        return f"row_bytes of {mine.name}, {mine.row_bytes} here and {other.row_bytes} there"
    return None


def _num_blocks(first: int, num: int, block: int) -> int:
    return (first + num - 1) // block - first // block + 1 if num else 0


def digest(
    layout: KVLayout | Any,
    pages: Indices,
    *,
    start: int = 0,
    first_token: int | None = None,
    num_tokens: int | None = None,
    block_tokens: int = 64,
    peer: KVLayout | None = None,
    num_threads: int | None = None,
) -> KVDigest:
    """Digest the contents of some tokens of one sequence on one side.

    Two sides with the same contents have the same digest, for any pages, page sizes, strides and
    order of heads and tokens. Moving a row to another position, head, layer or kind changes the
    digest. The digest adds 64-bit hashes of all rows (one per token and head). It detects errors;
    it does not resist an attacker who forges contents with the same digest.

    Parameters
    ----------
    layout : KVLayout
        Buffers in the memory of this process. A pool stands for its `KVLayout.from_pool`.
    pages : ints [pages]
        Pages of the sequence in its order, as for `plan_kv_transfer`.
    start : int
        Token at which the first page of the list begins.
    first_token, num_tokens : int, optional
        Tokens to digest. Default: from `start` to the end of the list.
    block_tokens : int
        Positions per sum, the same on both sides; it sets how exactly a difference is located.
    peer : KVLayout, optional
        Peer that holds a part only: digest just the layers, heads and tokens (of its DCP rank) that
        it has, too. It must hold all pages of its tokens (``shard_size`` 1).
    num_threads : int, optional
        Number of threads, which does not change the digest. Default: that of the library.

    Returns
    -------
    KVDigest
        Digest without buffers that are left out. Pages that are not rows of tokens have one hash
        per page; to compare them, both sides need the same page size, and whole pages.

    Raises
    ------
    TypeError
        If `layout` is neither a KVLayout nor a pool, or a page or number is no integer.
    ValueError
        If the buffers lack a page or token, a page comes twice, buffers overlap, or this process
        cannot read the memory.

    Examples
    --------
    The sender adds its digest to its other messages; the receiver checks what has arrived:

    >>> import json
    >>> import numpy as np
    >>> from cpattn.transfer import KVDigest, KVEntry, KVLayout, digest
    >>> def side(page_size, rows, pages):
    ...     cache = np.zeros((9, page_size, 1, 8), np.float32)
    ...     cache[pages] = rows.reshape(len(pages), page_size, 1, 8)
    ...     entry = KVEntry.from_tensor(0, "k", cache)
    ...     return cache, KVLayout([entry], page_size=page_size)
    >>> rows = np.arange(64.0)
    >>> source, there = side(4, rows, [7, 2])
    >>> target, here = side(8, rows, [5])
    >>> message = json.dumps(digest(there, [7, 2]).to_dict())
    >>> digest(here, [5]).check(KVDigest.from_dict(json.loads(message)))
    """
    if not isinstance(layout, KVLayout):
        layout = KVLayout.from_pool(layout)
    given = _core.ints(pages, "digest", "pages")
    block_tokens = at_least(1, block_tokens, "digest", "block_tokens")
    buffers = _core.digest_kv(
        layout, given, start, first_token, num_tokens, block_tokens, peer, num_threads
    )
    start = int(start)
    first = start if first_token is None else int(first_token)
    if num_tokens is None:
        num_tokens = start + len(given) * layout.page_size - first
    made = KVDigest(
        tuple(_Buffer(*buffer) for buffer in buffers), first, int(num_tokens), block_tokens
    )
    object.__setattr__(made, "_places", _Pages(layout, given, start))
    return made


KVDigest.__module__ = KVMismatch.__module__ = "cpattn.transfer"
