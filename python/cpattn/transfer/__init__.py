# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between prefill and decode servers: what is sent, in which order.

``pages``     tokens to pages, pages to runs, and what of a prompt is sent when
``pointers``  which destination buffer receives which source buffer, as the engines do it
``args``      what a server says of its buffers
``send``      the plans of the engines' senders
``layout``    buffers that say which layer, kind and tokens they hold
``planner``   plans from two layouts, paired by what they hold
``plan``      a plan: blocks to copy, and their execution over an engine
``engine``    what moves bytes
``local``     an engine within one process
``regions``   which memory to register with an engine, of lists that name some twice
``registration``  `register`: memory of layouts, pools and tensors, held while it is registered
``wire``      the messages between servers, in the byte formats of engines
"""

from .engine import TransferEngine, TransferError, TransferStatus
from .layout import KVEntry, KVLayout
from .local import LocalEngine
from .plan import TransferPlan
from .planner import KVLink, KVLinks, plan_kv_links, plan_kv_transfer
from .regions import registration_regions
from .registration import Registration, register

__all__ = [
    "KVEntry",
    "KVLayout",
    "KVLink",
    "KVLinks",
    "LocalEngine",
    "Registration",
    "TransferEngine",
    "TransferError",
    "TransferPlan",
    "TransferStatus",
    "plan_kv_links",
    "plan_kv_transfer",
    "register",
    "registration_regions",
]
