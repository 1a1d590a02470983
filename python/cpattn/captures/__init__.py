# SPDX-License-Identifier: Apache-2.0
"""Recording of plans and exchanges of the library inside a running engine.

    with cpattn.captures.capture("run.cpcap"):
        engine.step()

``recorder``  listens to calls, and writes them in a thread
``told``      fields recorded of each call: lengths, tables, sizes, times; no tokens or values
``lines``     file format: a line of JSON for each call

`cpattn_proof.read_captures` reads the files.
"""

from .recorder import capture

__all__ = ["capture"]
