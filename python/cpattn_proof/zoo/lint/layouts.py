# SPDX-License-Identifier: Apache-2.0
"""LAYOUT: bytes that one side wrote in another order than the other side reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._documents import Document, document, entry

Axis = tuple[str, int] | tuple[str, int, int]  # the third is a stride if the axis is not contiguous


def _side(by: str, *axes: Axis, itemsize: int = 1) -> dict[str, Any]:
    names = ("axis", "size", "stride")
    pieces = [dict(zip(names, axis, strict=False)) for axis in axes]
    return {"by": by, "itemsize": itemsize, "axes": pieces}


def _layout(buffer: str, writer: dict[str, Any], reader: dict[str, Any]) -> Document:
    return document(layouts=[{"buffer": buffer, "writer": writer, "reader": reader}])


def _tiles(tokens: int, width: int, tile: int = 16) -> Sequence[Axis]:
    return ("token", tokens // tile), ("dim", width // tile), ("token", tile), ("dim", tile)


def _index_keys_in_rows(mended: bool) -> Document:
    """Pages of 64 index keys of 128 bytes were stored as rows, and read in tiles of 16 by 16."""
    tiles = _tiles(64, 128)
    rows: Sequence[Axis] = (("token", 64), ("dim", 128))
    return _layout(
        "a page of index keys", _side("the store", *(tiles if mended else rows)),
        _side("the logits", *tiles),
    )  # fmt: skip


def _columns_of_a_block(mended: bool) -> Document:
    """Weights of a tile were stored in rows as long as a full block of keys, and multiplied in rows
    as long as the remaining keys."""
    block, left = 64, 32
    width = left if mended else block
    return _layout(
        "weights of a tile",
        _side("the softmax", ("row", 4, 2 * width), ("key", left, 2), itemsize=2),
        _side("the product", ("row", 4), ("key", left), itemsize=2),
    )


def _pages_of_another_device(mended: bool) -> Document:
    """A GPU sent pages with tokens before heads; the CPU's attention has heads first."""
    tokens, heads, dim = 64, 8, 128
    sent: Sequence[Axis] = (("token", tokens), ("head", heads), ("dim", dim))
    kept: Sequence[Axis] = (("head", heads), ("token", tokens), ("dim", dim))
    return _layout(
        "a page of keys", _side("the connector", *(kept if mended else sent), itemsize=2),
        _side("attention on the CPU", *kept, itemsize=2),
    )  # fmt: skip


def _gathered_heads(mended: bool) -> Document:
    """Keys of all heads of a token were gathered to the place of its first head."""
    tokens, heads, dim = 32, 4, 128
    step = 2 * dim if mended else 0
    return _layout(
        "gathered keys",
        _side(
            "the gather", ("token", tokens, 2 * heads * dim), ("head", heads, step), ("dim", dim, 2)
        ),
        _side("attention", ("token", tokens), ("head", heads), ("dim", dim), itemsize=2),
    )


def _halves_for_pairs(mended: bool) -> Document:
    """All keys come before all values, but the shape said that each block has keys and values."""
    blocks, size = 16, 4096
    halves: Sequence[Axis] = (("k or v", 2), ("block", blocks), ("byte", size))
    pairs: Sequence[Axis] = (("block", blocks), ("k or v", 2), ("byte", size))
    return _layout(
        "the cache of a layer", _side("the pool", *halves),
        _side("the connector", *(halves if mended else pairs)),
    )  # fmt: skip


ENTRIES = [
    entry(
        "sgl-project/sglang#31563", "LAYOUT",
        "Index keys were stored in rows and read in tiles.", _index_keys_in_rows, "pull",
    ),
    entry(
        "sgl-project/sglang#25180", "LAYOUT",
        "Weights were stored for a whole block of keys, and read for those that are left.",
        _columns_of_a_block, "pull",
    ),
    entry(
        "vllm-project/vllm#47871", "LAYOUT",
        "Pages of a GPU were taken for those of a CPU.", _pages_of_another_device, "pull",
    ),
    entry(
        "vllm-project/vllm#29887", "LAYOUT",
        "A gather wrote all heads of a token to one place.", _gathered_heads, "pull",
    ),
    entry(
        "ovg-project/kvcached#391", "LAYOUT",
        "The order of keys and values was guessed from a shape.", _halves_for_pairs, "pull",
    ),
]  # fmt: skip
