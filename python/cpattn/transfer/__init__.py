# SPDX-License-Identifier: Apache-2.0
"""KV-cache transfer between prefill and decode servers: what is sent, in which order.

    plan = plan_kv_transfer(KVLayout.from_pool(pool), peer_layout, src_pages, dst_pages)
    with register(engine, pool):
        plan.execute(engine, session)

``layout`` (with ``entry``, ``layout_sources``) says which layer, kind and tokens a buffer holds;
``planner`` makes plans of two layouts, ``plan`` is one, ``execute`` runs it. ``engine`` says what
moves bytes, ``local`` is one within a process; ``registration`` and ``regions`` are for memory
that engines may touch. ``wire`` has the messages between servers,
``handshake`` one that names where they differ; ``digests`` tell whether both sides hold the same.
``sglang_0_5_23`` alone has the functions of that release under its names. Imports the core, and no
engine (`cpattn.integrations`).
"""

from . import sglang_0_5_23 as sglang_0_5_23
from .digests import KVDigest, KVMismatch, digest
from .engine import TransferEngine, TransferError, TransferStatus
from .handshake import KVHandshake, KVHandshakeError
from .layout import KVEntry, KVLayout
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
