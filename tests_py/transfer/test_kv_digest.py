# SPDX-License-Identifier: Apache-2.0
"""Digests of KV compare sides of different shapes, and transfers after they are done."""

import json
import pickle
import re

import numpy as np
import pytest

import cpattn
from cpattn.transfer import (
    KVDigest,
    KVEntry,
    KVLayout,
    KVMismatch,
    LocalEngine,
    TransferPlan,
    digest,
    plan_kv_transfer,
    register,
)

TOKENS, HEADS, DIM, LAYERS = 70, 4, 8, 2
KINDS = ("k", "v")


class Side:
    """Caches of all layers that number pages in their own way; they may have a prompt's rows."""

    def __init__(self, page_size, rows=None, *, kv_layout="NHD", heads=(0, HEADS), seed=0, **more):
        num_pages = -(-TOKENS // page_size)
        self.pages = np.random.default_rng(seed).permutation(num_pages + 3)[:num_pages].tolist()
        first, end = heads
        shape = (num_pages + 3, page_size, end - first, DIM)
        self.caches = {
            (layer, kind): np.zeros(shape, np.float16) for layer in range(LAYERS) for kind in KINDS
        }
        for key, cache in self.caches.items():
            if rows is not None:
                for token in range(TOKENS):
                    page, row = divmod(token, page_size)
                    cache[self.pages[page], row] = rows[key][token, first:end]
            if kv_layout == "HND":
                self.caches[key] = np.ascontiguousarray(cache.swapaxes(1, 2))
        entries = [
            KVEntry.from_tensor(layer, kind, cache, kv_layout=kv_layout)
            for (layer, kind), cache in self.caches.items()
        ]
        self.layout = KVLayout(entries, page_size, total_kv_heads=HEADS, **more)

    def digest(self, **more):
        return digest(self.layout, self.pages, num_tokens=TOKENS, **more)


@pytest.fixture
def rows():
    generator = np.random.default_rng(7)
    return {
        (layer, kind): generator.standard_normal((TOKENS, HEADS, DIM)).astype(np.float16)
        for layer in range(LAYERS)
        for kind in KINDS
    }


def over_the_wire(value):
    return KVDigest.from_dict(json.loads(json.dumps(value.to_dict())))


def test_what_has_arrived_is_what_was_sent(rows):
    source, target = Side(16, rows), Side(64, kv_layout="HND", seed=1)
    plan = plan_kv_transfer(
        source.layout, target.layout, source.pages, target.pages, num_tokens=TOKENS
    )
    sent = over_the_wire(source.digest())
    with pytest.raises(KVMismatch, match=r"4 of 4 buffers differ: k of layer 0, tokens \[0, 70\)"):
        target.digest().check(sent)
    with (
        LocalEngine() as engine,
        LocalEngine() as peer,
        register(engine, source.layout, *source.caches.values()),
        register(peer, target.layout, *target.caches.values()),
    ):
        plan.execute(engine, peer.session_id, verify=True)
    target.digest().check(sent)
    assert target.digest() == sent
    assert pickle.loads(pickle.dumps(target.digest())) == sent


def test_a_mismatch_names_layer_kind_tokens_and_pages(rows):
    source, target = Side(16, rows), Side(16, rows, seed=1)
    target.caches[1, "v"][target.pages[2], 3, 1, 5] += 1
    named = r"^KVDigest.check: 1 of 4 buffers differ: v of layer 1, tokens \[32, 48\), "
    with pytest.raises(KVMismatch, match=named + rf"pages \[{target.pages[2]}\]$") as caught:
        target.digest(block_tokens=16).check(source.digest(block_tokens=16))
    assert len(pickle.loads(pickle.dumps(caught.value)).differences) == 1


def test_ranks_add_up_and_each_is_what_the_whole_has_for_it(rows):
    whole = Side(16, rows)
    ranks = [
        Side(64, rows, heads=(2 * i, 2 * i + 2), seed=i, tp_rank=i, tp_size=2) for i in range(2)
    ]
    assert ranks[0].digest() + ranks[1].digest() == whole.digest()
    for rank in ranks:
        assert whole.digest(peer=rank.layout) == rank.digest()
    lacking = re.escape("k of layer 0 has 140 rows (of a token and head) here, 280 there")
    with pytest.raises(KVMismatch, match=lacking):
        ranks[0].digest().check(whole.digest())


def test_digests_that_do_not_compare(rows):
    side = Side(16, rows)
    whole = side.digest()
    with pytest.raises(KVMismatch, match="block_tokens, 64 here and 16 there"):
        whole.check(side.digest(block_tokens=16))
    with pytest.raises(ValueError, match="parts must have the same block_tokens"):
        whole + side.digest(block_tokens=16)
    with pytest.raises(KVMismatch, match="num_tokens, 70 here and 69 there"):
        whole.check(digest(side.layout, side.pages, num_tokens=69))
    entries = [entry._replace(dtype="bfloat16") for entry in side.layout.entries[:3]]
    other = digest(KVLayout(entries, 16, total_kv_heads=HEADS), side.pages, num_tokens=TOKENS)
    with pytest.raises(KVMismatch) as caught:
        whole.check(other)
    assert caught.value.differences[0] == "dtype of k of layer 0, float16 here and bfloat16 there"
    assert caught.value.differences[-1] == "v of layer 1 was not sent"
    with pytest.raises(TypeError, match="sent must be a KVDigest, got dict"):
        whole.check(whole.to_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "cpattn-kv-digest/2"}, {"block_tokens": 0}, {"num_tokens": 700},
        {"buffers": [[0, "k", False]]}, {"buffers": 3},
    ],
)  # fmt: skip
def test_messages_of_something_else(rows, change):
    with pytest.raises(ValueError, match=r"^KVDigest.from_dict: fields must be of to_dict: "):
        KVDigest.from_dict(Side(16, rows).digest().to_dict() | change)


def test_a_pool_stands_for_its_layout():
    pool = cpattn.kv.MHATokenToKVPool(
        size=64, page_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32",
        container="numpy",
    )  # fmt: skip
    assert digest(pool, [1, 3]) == digest(KVLayout.from_pool(pool), [1, 3])
    with pytest.raises(TypeError, match="pool must be a KV pool"):
        digest([], [1])


def test_memory_of_nobody_is_refused():
    layout = KVLayout([KVEntry(0, "k", False, 1 << 46, 4608, 512)], page_size=8)
    with pytest.raises(
        ValueError, match="digest: addrs and sizes must be memory that this process"
    ):
        digest(layout, [1])


def test_a_transfer_that_wrote_something_else_is_named(rows):
    source, target = Side(16, rows), Side(16, seed=1)
    plan = plan_kv_transfer(source.layout, target.layout, source.pages, target.pages)

    class Tearing(LocalEngine):
        """An engine that changes a byte in values of layer 1, page 2 of the sequence."""

        def write(self, session, src_addrs, dst_addrs, lengths):
            code = super().write(session, src_addrs, dst_addrs, lengths)
            target.caches[1, "v"].view(np.uint8)[target.pages[2], 0, 0, 0] ^= 1
            return code

    with (
        Tearing() as engine,
        LocalEngine() as peer,
        register(engine, source.layout, *source.caches.values()),
        register(peer, target.layout, *target.caches.values()),
    ):
        plan.execute(engine, peer.session_id)
        place = rf"v of layer 1, page {source.pages[2]} here and {target.pages[2]} there"
        with pytest.raises(KVMismatch, match=place):
            plan.execute(engine, peer.session_id, verify=True)
        bare = TransferPlan(plan.src_addrs, plan.dst_addrs, plan.lengths)
        assert bare == plan
        assert bare.layouts is None
        with pytest.raises(KVMismatch, match=r"1 of \d+ blocks .*: block \d+, \d+ bytes from 0x"):
            bare.execute(engine, peer.session_id, verify=True)


def test_engines_over_a_network_have_digests_instead():
    class Remote:
        max_blocks = 4

        def write(self, *_):
            return 0

    plan = TransferPlan([4096], [8192], [512])
    with pytest.raises(TypeError, match="engine, for verify, must have differing, got Remote"):
        plan.execute(Remote(), "peer", verify=True)


def test_differing_needs_registered_memory():
    with (
        LocalEngine() as engine,
        pytest.raises(ValueError, match=r"^LocalEngine.differing: blocks"),
    ):
        engine.differing(engine.session_id, [4096], [8192], [16])
