# SPDX-License-Identifier: Apache-2.0
"""What was planned and exchanged inside a running engine, recorded and read again.

    with capture("run.cpcap"):
        engine.step()
    read_captures(["run.cpcap"])

``recorder``  listens to calls, and has a thread write them down
``told``      what is recorded of each call: lengths, tables, sizes, times; never tokens or values
``records``   the file: a line of JSON for each call
``fields``    what records of each call have to have, checked when they are read
``reader``    the calls of all ranks again, and the batches among them
``remade``    plans once more from what was recorded, compared and predicted for other ranks
"""

from .reader import Capture, RecordedBatch, RecordedCall, read_captures
from .recorder import capture
from .remade import Remade, remake

__all__ = [
    "Capture",
    "RecordedBatch",
    "RecordedCall",
    "Remade",
    "capture",
    "read_captures",
    "remake",
]
