# SPDX-License-Identifier: Apache-2.0
"""KV goes from a prefill to a decode fleet over engines, byte for byte, in chunks of the prompt.

Plans over layouts go from one process to another over Mooncake; `test_plan_kv_links` sends more of
them within a process. Plans by functions of engines go over the engine within this process.
"""

import random
from itertools import product

import numpy as np
import pytest

from cpattn.transfer import LocalEngine
from cpattn.transfer.sglang_0_5_23 import (
    KVArgs,
    KVSendCursor,
    decode_targets,
    plan_send_kvcache,
    plan_send_kvcache_slice,
)
from support.transfer.engines import MOONCAKE
from support.transfer.kv_fleets import (
    Case,
    Model,
    Receiver,
    Side,
    filled,
    finish,
    prepare,
    register,
    send,
)
from support.transfer.transfer_processes import Peer

MHA, MLA, DSA = {"k": 4, "v": 4}, {"k": 8, "v": 2}, {"k": 8, "v": 2, "index_k": 3}


def random_case(seed: int) -> Case:
    """Draw any fleets that fit together."""
    draw = random.Random(seed)
    ids = tuple(draw.sample(range(12), draw.randint(2, 5)))
    kinds = draw.choice([MHA, {"k": 6, "v": 1}, MLA, DSA])
    model = Model(ids, kinds, draw.choice([2, 4]) if "index_k" not in kinds else 1, 700)
    share, page, drafts = draw.choice(["pages", "layers"]), draw.choice([1, 8, 16]), (0, 2)
    src, dst = (
        Side(
            draw.choice([page, 64]), tuple(sorted(draw.sample(range(1, max(ids) + 1), 2))),
            draw.choice([1, 2, 4]), draw.choice(drafts),
        )
        for _ in range(2)
    )  # fmt: skip
    chunks = tuple(sorted(draw.sample(range(1, 700), draw.randint(0, 3))))
    return Case(model, src, dst, draw.choice([0, 64, 65]), chunks, share, seed)


@pytest.mark.slow
def test_between_processes():
    MOONCAKE.require()
    make = MOONCAKE.make
    with Peer(make_engine=make) as decode, Peer(network_of=decode, make_engine=make) as prefill:
        for case in map(random_case, range(8)):
            prefill.call(send, case, decode.session_id, decode.call(prepare, case))
            assert decode.call(finish) == [], case


def kv_args(case, source):
    """Describe a prefill rank as an engine does."""
    entries, first = source.entries, (source.layers or (0, 0))[0]
    args = KVArgs(
        engine_rank=source.tp_rank, total_kv_head_num=case.model.num_heads,
        page_size=case.src.page_size, kv_data_ptrs=[entry.addr for entry in entries],
        kv_data_lens=[entry.nbytes for entry in entries], prefill_start_layer=first,
        kv_item_lens=[entry.item_len for entry in entries], total_kv_layers=len(case.model.ids),
    )  # fmt: skip
    if case.model.num_heads == 1:
        args.kv_buf_groups, args.draft_kv_layers = len(case.model.head_bytes), source.num_draft
        args.hidden_kv_layers = len(case.model.ids)
    return args


def plans_of_engines(case, sources, destinations, compat):
    """Yield the plan of each rank for each of its peers; positions tell the buffers apart."""
    src, dst, num_tokens = case.src, case.dst, case.model.num_tokens
    for source, to in product(sources, destinations):
        sizes = {"prefill_tp_size": src.tp_size, "decode_tp_size": dst.tp_size}
        is_mla = case.model.num_heads == 1
        if source.tp_rank not in decode_targets(to.tp_rank, **sizes, is_mla=is_mla).ranks:
            continue
        options = {
            "pp_size": len(src.borders) + 1, "compat": compat,
            "is_last_rank": source.layers is None or source.layers[1] == len(case.model.ids),
        }  # fmt: skip
        plan_send = plan_send_kvcache
        if is_mla or src.tp_size == dst.tp_size:
            options["is_mla"] = is_mla
        else:
            plan_send = plan_send_kvcache_slice
            options |= {
                "dst_tp_rank": to.tp_rank, "dst_attn_tp_size": dst.tp_size,
                "dst_kv_item_len": to.entries[0].item_len, "attn_tp_size": src.tp_size,
            }  # fmt: skip
        cursor = KVSendCursor(num_tokens, src.page_size, case.first, compat=compat)
        chunks = [cursor.advance(computed) for computed in case.chunks]
        chunks.append(cursor.advance(num_tokens, last_chunk=True))
        listed = source.slots, to.pages[case.first // dst.page_size :]
        ptrs = [entry.addr for entry in to.entries]
        for chunk in filter(None, chunks):
            pages = chunk.select(*listed)
            yield plan_send(kv_args(case, source), ptrs, *map(np.asarray, pages), **options)


LISTED = [
    # A row has a stage's first layers, drafts of both sides, ranks of both sides, and compat.
    *((MHA, 4, *row) for row in [
        ((), (2, 2), (1, 1), False), ((3,), (0, 2), (1, 1), False), ((2,), (0, 0), (1, 1), True),
        ((2,), (0, 0), (1, 2), False), ((3,), (0, 0), (4, 1), False), ((2,), (0, 0), (2, 8), False),
        ((2,), (0, 0), (8, 8), False)]),
    *((kinds, 1, *row) for kinds in (MLA, DSA) for row in [
        ((3,), (2, 2), (1, 1), False), ((2,), (0, 2), (2, 1), False), ((3,), (0, 2), (1, 2), False),
        ((), (2, 2), (2, 2), False), ((), (1, 1), (1, 1), True), ((3,), (1, 1), (1, 1), True)]),
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "heads", "borders", "drafts", "ranks", "compat"), LISTED)
@pytest.mark.parametrize(("first", "chunks"), [(0, ()), (32, (40, 65))])
def test_functions_of_engines(kinds, heads, borders, drafts, ranks, compat, first, chunks):
    src, dst = (
        Side(16, borders if i == 0 else (), ranks[i], drafts[i], in_order=True) for i in range(2)
    )
    case = Case(Model(tuple(range(4)), kinds, heads, 90), src, dst, first, chunks)
    with LocalEngine() as engine, LocalEngine() as peer:
        receiver, sources = Receiver(peer, case), filled(case)
        register(engine, sources)
        for plan in plans_of_engines(case, sources, receiver.servers, compat):
            assert plan.execute(engine, peer.session_id).bytes_done == plan.total_bytes
        assert receiver.wrong(whole_pages=True) == []
