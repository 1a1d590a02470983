# SPDX-License-Identifier: Apache-2.0
"""Prefill here, decoding in another process, and KV pages over an engine from one to the other.

``driver`` is the driver's part, and where to start; ``handover`` says which pages go when,
``endpoint`` sends and receives them; ``decode`` is the decode process; ``check`` compares its
tokens with those of one process. Imports torch, `cpattn.transfer` and the engine of Mooncake.
"""
