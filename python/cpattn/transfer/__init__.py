# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between prefill and decode servers: blocks to send, and their order.

    plan = plan_kv_transfer(KVLayout.from_pool(pool), peer_layout, src_pages, dst_pages)
    with register(engine, pool):
        plan.execute(engine, session)

``layout`` (with ``entry``, ``layout_sources``) describes layer, kind and tokens of buffers;
``planner`` plans a transfer between two layouts, ``plan`` has the result, ``execute`` runs it.
``engine`` is the interface that moves bytes, ``local`` an engine within a process; ``registration``
and ``regions`` manage memory that engines may touch. ``wire`` has the messages between servers,
``handshake`` one that names differences; ``digests`` tell whether both sides hold the same. Only
``sglang_0_5_23`` has functions under the names of that release. Imports the core, and no engine
(`cpattn.integrations`).
"""

from . import sglang_0_5_23 as sglang_0_5_23
from .digests import KVDigest, KVMismatch, digest
from .engine import TransferEngine, TransferError, TransferStatus
from .entry import KVEntry
from .handshake import KVHandshake, KVHandshakeError
from .layout import KVLayout
from .local import LocalEngine
from .plan import TransferPlan
from .planner import KVLink, KVLinks, plan_kv_links, plan_kv_transfer
from .regions import registration_regions
from .registration import Registration, register
from .wire import KVRegistration, KVTransferRequest, pack_int_lists, unpack_int_lists

__all__ = [
    "KVDigest",
    "KVEntry",
    "KVHandshake",
    "KVHandshakeError",
    "KVLayout",
    "KVLink",
    "KVLinks",
    "KVMismatch",
    "KVRegistration",
    "KVTransferRequest",
    "LocalEngine",
    "Registration",
    "TransferEngine",
    "TransferError",
    "TransferPlan",
    "TransferStatus",
    "digest",
    "pack_int_lists",
    "plan_kv_links",
    "plan_kv_transfer",
    "register",
    "registration_regions",
    "unpack_int_lists",
]
