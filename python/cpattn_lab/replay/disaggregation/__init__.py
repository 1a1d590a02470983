# SPDX-License-Identifier: Apache-2.0
"""Prefill here, decoding in another process, with KV pages sent over an engine.

``driver`` has the driver's part, start there; ``handover`` selects the pages to send, ``endpoint``
sends and receives them; ``decode`` is the decode process; ``check`` compares its tokens with those
of one process. Imports torch, `cpattn.transfer` and the engine of Mooncake.
"""
