# SPDX-License-Identifier: Apache-2.0
"""Reads lines of a capture, as written by `cpattn.captures.lines`."""

from __future__ import annotations

import math
import zlib
from base64 import b64decode
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from .. import strict_json

_PACKED = "zlib"  # the member that marks an array, as written by cpattn.captures
_DTYPES = ("int32", "int64", "uint64")
_MAX_BYTES = 1 << 31  # total of all arrays, so that a damaged file cannot ask for more


class Room:
    """Bytes left for all arrays of a capture together."""

    def __init__(self, num_bytes: int = _MAX_BYTES) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        """Raise ValueError if fewer bytes are left."""
        self._left -= num_bytes
        if self._left < 0:
            raise ValueError(f"arrays must have at most {_MAX_BYTES} bytes together, got more")


def from_line(
    line: bytes, room: Room | None = None, read: Mapping[str, Collection[str]] | None = None
) -> dict[str, Any]:
    """Return the record of a line; ValueError if it is invalid, or its arrays exceed `room`.

    Calls in `read` get arrays for these fields only; other calls with arrays are left out.
    """
    record = strict_json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a record must be an object, got {type(record).__name__}")
    room = Room() if room is None else room
    name = record.get("call")
    wanted = (read or {}).get(name) if isinstance(name, str) else None
    return {
        name: _decoded(value, room)
        for name, value in record.items()
        if wanted is None or name in wanted or not isinstance(value, (dict, list))
    }


def _decoded(value: Any, room: Room) -> Any:
    if isinstance(value, list):
        parts = set(map(type, value)) & {dict, list}
        return [_decoded(one, room) for one in value] if parts else value
    if not isinstance(value, dict):
        return value
    if _PACKED not in value:
        return {name: _decoded(one, room) for name, one in value.items()}
    dtype, shape = value.get("dtype"), value.get("shape")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape must be a list of sizes, got {shape!r}")
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    room.take(num_bytes)
    try:
        packed = b64decode(value[_PACKED], validate=True)
        raw = zlib.decompressobj().decompress(packed, num_bytes + 1)
    except (zlib.error, TypeError) as error:
        raise ValueError(f"an array is damaged: {error}") from error
    if len(raw) != num_bytes:
        raise ValueError(f"an array of shape {shape} must have {num_bytes} bytes, has others")
    return np.frombuffer(raw, dtype).reshape(shape)
