# SPDX-License-Identifier: Apache-2.0
"""Disaggregated serving: ranks prefill, and send KV pages over an engine to a decode process.

``driver`` has the driver's part; start there. ``handover`` selects the pages to send, ``endpoint``
sends and receives them; ``decode`` is the decode process; ``check`` compares its tokens with those
of one process. Imports torch, `cpattn.transfer` and the engine of Mooncake.
"""
