# SPDX-License-Identifier: Apache-2.0
"""The lines of a capture: JSON, with arrays compressed, as they may be long and come often."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

SCHEMA = "cpattn-capture/1"
PACKED = "zlib"  # the member that makes an object an array


def to_line(record: Mapping[str, Any]) -> bytes:
    """A record with NumPy arrays as one line."""
    return json.dumps(record, default=_encoded, separators=(",", ":")).encode() + b"\n"


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        packed = zlib.compress(np.ascontiguousarray(value).tobytes(), 1)
        return {"dtype": value.dtype.name, "shape": value.shape, PACKED: b64encode(packed).decode()}
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"no record has a {type(value).__name__}")
