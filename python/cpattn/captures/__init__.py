# SPDX-License-Identifier: Apache-2.0
"""Record what the library plans and exchanges inside a running engine.

    with cpattn.captures.capture("run.cpcap"):
        engine.step()

``recorder``  listens to calls, and has a thread write them down
``told``      what is recorded of each call: lengths, tables, sizes, times; never tokens or values
``lines``     the file: a line of JSON for each call

`cpattn_proof.read_captures` reads such files again.
"""

from .recorder import capture

__all__ = ["capture"]
