# SPDX-License-Identifier: Apache-2.0
"""Reads what `cpattn.captures` recorded inside a running engine.

``records``   a line of the file: arrays are bounded together
``fields``    what records of each call have to have, checked when they are read
``reader``    the calls of all ranks again, and the batches among them
``remade``    plans once more from what was recorded, compared; needs `cpattn`
"""

from .reader import Capture, RecordedBatch, RecordedCall, read_captures

__all__ = [
    "Capture",
    "RecordedBatch",
    "RecordedCall",
    "read_captures",
]
