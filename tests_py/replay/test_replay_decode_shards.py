# SPDX-License-Identifier: Apache-2.0
"""Pages of shards are sent to shards, each once and to its place, and decoded there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from cpattn.replay.dense.model import DenseConfig
from cpattn.replay.disaggregation.driver import decode_pages
from cpattn.replay.disaggregation.endpoint import Endpoint
from cpattn.replay.disaggregation.handover import Delivery
from cpattn.replay.driver import replay
from cpattn.replay.report.summary import figures, summarize
from cpattn.traffic.trace import generate_trace
from cpattn.transfer import KVEntry, KVLayout
from support.replay.replay_models import OPTIONS, SMALL
from support.transfer.transfer_processes import requires_mooncake


def page_bytes(model: DenseConfig) -> int:
    """Of keys, values and scales of all layers."""
    element = 1 if model.has_codes else model.torch_dtype.itemsize
    head = model.head_dim * element + 2 * (model.kv_dtype == "int8")
    return 4 * model.num_layers * 2 * model.num_kv_heads * head


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "cp_size", "pp_size", "decode_ranks", "kv_dtype"),
    [
        ("replicated", 2, 1, 2, "bf16"),
        ("page_interleave", 3, 1, 2, "int8"),
        ("page_interleave", 2, 2, 1, "fp8"),
    ],
)
def test_tokens_are_those_of_one_process(placement, cp_size, pp_size, decode_ranks, kv_dtype):
    requires_mooncake()
    model = replace(SMALL, head_dim=32, vocab_size=256, kv_dtype=kv_dtype)
    options = replace(
        OPTIONS, model=model, placement=placement, cp_size=cp_size, pp_size=pp_size,
        decode_ranks=decode_ranks, decode_tokens=6,
    )  # fmt: skip
    report = replay(generate_trace(10, seed=2), options)
    assert report.passed
    decode = report.decode
    assert decode is not None
    assert decode.num_tokens > 8
    assert decode.checked_tokens == decode.num_tokens + 10
    assert decode.wrong_tokens == 0
    for transfer in decode.transfers:
        assert transfer.num_bytes == transfer.num_pages * page_bytes(model)
    share = decode_pages(options) // decode_ranks + 1  # and page 0
    assert decode.pool_bytes == [share * page_bytes(model)] * decode_ranks
    assert (decode.sent_bytes > 0) == (decode_ranks > 1)
    assert summarize(report)["decode"]["pool_bytes"] == sum(decode.pool_bytes)
    (line,) = (text for name, text in figures(report) if name == "decode")
    assert (f"over {decode_ranks} ranks with" in line) == (decode_ranks > 1)


class Recorder:
    """An engine that only notes what it is to write."""

    def __init__(self) -> None:
        self.written: dict[str, list[tuple[int, int, int]]] = {}

    def write(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        self.written.setdefault(session, []).extend(zip(src, dst, lengths, strict=True))
        return 0


@pytest.mark.parametrize(
    ("cp_size", "num_peers", "is_sharded"),
    [(size, peers, (size + peers) % 2 == 0) for size in (1, 2, 3) for peers in (1, 2, 3)],
)
def test_each_page_is_sent_once_to_its_place(cp_size, num_peers, is_sharded):
    rng = np.random.default_rng(cp_size * 10 + num_peers)
    # Pages of 8 bytes; those of rank r of a group lie at r << 20.
    src_pages, dst_pages = (rng.permutation(np.arange(3, 90))[:40].astype(np.int32) for _ in "sd")
    sent: set[tuple[str, int, int]] = set()
    for cp_rank in range(cp_size):
        link: Any = Endpoint.__new__(Endpoint)
        link._engine = Recorder()
        link._layout = KVLayout([KVEntry(0, "k", False, (cp_rank + 1) << 20, 800, 8)], 1)
        link._peers = [(str(i), 0) for i in range(num_peers)]
        link._peer_layouts = [
            KVLayout([KVEntry(0, "k", False, (i + 1) << 30, 800, 8)], 1) for i in range(num_peers)
        ]
        delivery = Delivery(src_pages, dst_pages, ())
        transfer = link.send_pages(delivery, cp_rank, cp_size, is_sharded=is_sharded)
        assert transfer.num_bytes == sum(
            length for blocks in link._engine.written.values() for _, _, length in blocks
        )
        for session, blocks in link._engine.written.items():
            for src, dst, length in blocks:
                for offset in range(0, length, 8):
                    there = (dst + offset - ((int(session) + 1) << 30)) // 8
                    here = (src + offset - ((cp_rank + 1) << 20)) // 8
                    page = here * cp_size + cp_rank if is_sharded else here
                    item = (session, page, there * num_peers + int(session))
                    assert item not in sent
                    sent.add(item)
    assert {(page, there) for _, page, there in sent} == set(
        zip(src_pages.tolist(), dst_pages.tolist(), strict=True)
    )
