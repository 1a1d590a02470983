# SPDX-License-Identifier: Apache-2.0
"""Lines of a capture: JSON with compressed arrays, as arrays may be long and frequent."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np

SCHEMA = "cpattn-capture/1"
PACKED = "zlib"  # the member that marks an object as an array


def to_line(record: Mapping[str, Any]) -> bytes:
    """Return a record with NumPy arrays as one line."""
    return json.dumps(record, default=_encoded, separators=(",", ":")).encode() + b"\n"


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        packed = zlib.compress(np.ascontiguousarray(value).tobytes(), 1)
        return {"dtype": value.dtype.name, "shape": value.shape, PACKED: b64encode(packed).decode()}
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"no record has a {type(value).__name__}")
