# SPDX-License-Identifier: Apache-2.0
"""Reads the files that `cpattn.captures` recorded inside a running engine.

``records``   lines of a file; bounds the bytes of all arrays together
``fields``    required fields of records of each call, checked on reading
``reader``    calls of all ranks, and the batches among them
``remade``    remakes plans from a recording and compares them; needs `cpattn`
"""

from .reader import Capture, RecordedBatch, RecordedCall, read_captures

__all__ = [
    "Capture",
    "RecordedBatch",
    "RecordedCall",
    "read_captures",
]
