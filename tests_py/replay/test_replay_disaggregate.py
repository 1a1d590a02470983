# SPDX-License-Identifier: Apache-2.0
"""Prefill in some processes and decoding in another give the tokens of one process. The last tests
check which pages go to the decode pool, and when."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.kv import MHATokenToKVPool
from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.request import Request
from cpattn.scheduling.scheduler import Batch, prefill_batches
from cpattn.transfer import LocalEngine
from cpattn_lab.processes.workers import WorkerError
from cpattn_lab.replay import footprint
from cpattn_lab.replay.disaggregation.check import DecodeChecker, SparseDecodeChecker
from cpattn_lab.replay.disaggregation.driver import decode_pages
from cpattn_lab.replay.disaggregation.endpoint import Endpoint, require_engine
from cpattn_lab.replay.disaggregation.handover import (
    Continuation,
    Delivery,
    Handover,
    decode_pool_pages,
)
from cpattn_lab.replay.driver import replay
from cpattn_lab.replay.records import DecodeReport, ReplayReport
from cpattn_lab.replay.report.summary import figures, summarize
from cpattn_lab.traffic.trace import block_tokens_of, generate_trace, scale_lengths
from support.examples import examples
from support.replay.replay_in_one_process import DECODE, InOneProcess
from support.replay.replay_models import FP8_DSA, OPTIONS, SMALL, SMALL_DSA
from support.transfer.transfer_processes import requires_mooncake

DENSE = replace(SMALL, num_layers=4, vocab_size=256)
CODES = [replace(DENSE, head_dim=32, kv_dtype=name) for name in ("fp8", "fp8_e5m2", "int8")]
SPARSE, FP8_ROWS = (replace(model, vocab_size=256) for model in (SMALL_DSA, FP8_DSA))
DECODING = replace(OPTIONS, model=DENSE, cp_size=1, decode_tokens=6)
REQUESTS = scale_lengths(generate_trace(12, seed=2), 64)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run(
    model: Any,
    requests: list[Request] = REQUESTS,
    harm: Callable[[InOneProcess], None] = lambda _: None,
    **sizes: int,
) -> InOneProcess:
    with InOneProcess(model, **sizes) as system:
        system.run(requests, harm)
    return system


def page_bytes(model: Any) -> int:
    element = 1 if model.has_codes else model.torch_dtype.itemsize
    head = model.head_dim * element + 2 * (model.kv_dtype == "int8")
    return 4 * model.num_layers * 2 * model.num_kv_heads * head


@pytest.mark.parametrize(
    ("model", "token_bytes", "sizes"),
    [
        (replace(DENSE, num_layers=6), 6 * 2 * 2 * 16 * 4, (2, 2, 8)),
        (replace(DENSE, dtype="bfloat16"), 4 * 2 * 2 * 16 * 2, (3, 1, 8)),
        (DENSE, 4 * 2 * 2 * 16 * 4, (4, 3, 1)),
        (SPARSE, (64 + 16 + 32) * 4, (1, 2, 4)),
        (FP8_ROWS, 788, (1, 2, 1)),
        (FP8_ROWS, 788, (1, 1, 4)),
        *((model, page_bytes(model) // 4, (2, 2, 4)) for model in CODES),
    ],
)
def test_tokens_are_those_of_one_process(model, token_bytes, sizes):
    """All parts of rows arrive, and each token has the right keys, also in sparse models."""
    pp_size, cp_size, page_size = sizes
    system = run(model, pp_size=pp_size, cp_size=cp_size, page_size=page_size)
    checker = system.checker
    assert isinstance(checker, SparseDecodeChecker) == (model.kind == "dsa")
    assert checker.num_tokens == sum(min(DECODE, r.output_length) for r in REQUESTS)
    assert checker.num_wrong == 0
    assert checker.num_near_ties == 0 or model.dtype != "float32" or model in CODES
    assert 0 < checker.decode_error <= checker.tolerance
    assert max(checker.errors.values()) <= checker.tolerance
    assert system.handover.cached_tokens > 0
    sent = sum(-(-r.input_length // page_size) for r in REQUESTS)
    sent -= system.handover.cached_tokens // page_size
    assert system.num_bytes == sent * page_size * token_bytes
    if model in CODES:
        assert footprint.token_bytes(model) * model.num_layers == token_bytes


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (DENSE, "kv"),
        *((SPARSE, kind) for kind in ("k", "v", "index_k")),
        *((FP8_ROWS, kind) for kind in ("k", "index_k")),
    ],
)
def test_the_check_sees_a_page_of_another_prompt(model, kind):
    """The other prompt's page has been written before, so no NaN shows the fault."""

    def harm(system: InOneProcess) -> None:
        pool = system.decode._pool
        buffers = [getattr(pool, f"{kind}_buffer", [None])[0]]
        if kind == "kv":
            buffers = [buffer for layer in range(4) for buffer in pool.get_kv_buffer(layer)]
        for pages in buffers:
            pages[3] = pages[2]

    checker = run(model, scale_lengths(generate_trace(3, seed=2), 64), harm).checker
    assert checker.decode_error > checker.tolerance
    assert checker.num_wrong > 0 or model is not DENSE


def test_near_ties_are_not_wrong():
    checker = DecodeChecker(replace(DENSE, dtype="bfloat16"), block_tokens=8, rows_per_chunk=4)
    logits = torch.zeros(3, 8)
    logits[:, 5] = torch.tensor([0.0, 0.9, 1.1]) * checker.margin
    checker._compare_tokens([5, 5, 5], logits)
    assert (checker.num_tokens, checker.num_wrong, checker.num_near_ties) == (3, 0, 0)
    checker._compare_tokens([4, 4, 4], logits)
    assert (checker.num_tokens, checker.num_wrong, checker.num_near_ties) == (6, 1, 1)


def test_an_engine_is_tried_without_a_trace(capfd):
    requires_mooncake()
    before = dict(os.environ)
    require_engine()
    assert os.environ == before
    assert capfd.readouterr() == ("", "")


def children() -> dict[str, Any]:
    return {process.name: process for process in multiprocessing.active_children()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "name"), [("the-decode-process", "the decode process"), ("rank-0", "rank 0")]
)
def test_a_killed_process_ends_all(victim, name):
    requires_mooncake()

    def kill(done: int, total: int, what: str) -> None:
        if what == "batch 2":
            os.kill(children()[f"cpattn-{victim}"].pid, signal.SIGKILL)

    message = rf"^{name} \(process \d+\) was killed by SIGKILL$"
    with pytest.raises(WorkerError, match=message):
        replay(generate_trace(20, seed=2), DECODING, progress=kill)
    assert not children()


def test_wrong_tokens_fail_the_report():
    report = ReplayReport(OPTIONS, {}, 1, 1, 0, tolerance=0.1, decode=DecodeReport())
    assert report.passed
    report.decode.wrong_tokens = 1
    assert not report.passed
    report.decode = DecodeReport(max_error=0.2)
    assert not report.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "cp_size", "pp_size", "decode_ranks", "kv_dtype"),
    [
        ("replicated", 2, 1, 2, "bf16"),
        ("page_interleave", 3, 1, 2, "int8"),
        ("page_interleave", 2, 2, 1, "fp8"),
    ],
)
def test_tokens_of_shards_are_those_of_one_process(
    placement, cp_size, pp_size, decode_ranks, kv_dtype
):
    requires_mooncake()
    model = replace(SMALL, head_dim=32, vocab_size=256, kv_dtype=kv_dtype)
    options = replace(
        OPTIONS, model=model, placement=placement, cp_size=cp_size, pp_size=pp_size,
        decode_ranks=decode_ranks, decode_tokens=6,
    )  # fmt: skip
    requests = generate_trace(10, seed=2)
    report = replay(requests, options)
    assert report.passed
    assert not children()
    decode = report.decode
    wanted = [min(6, -(-request.output_length // 64)) for request in requests]
    assert [len(r.tokens) for r in decode.requests] == wanted
    assert decode.checked_tokens == sum(wanted)
    assert decode.wrong_tokens == 0
    for transfer in decode.transfers:
        assert transfer.num_bytes == transfer.num_pages * page_bytes(model)
        assert 0 < transfer.plan_seconds < transfer.seconds
    share = decode_pages(options) // decode_ranks + 1  # page 0 counts, too
    assert decode.pool_bytes == [share * page_bytes(model)] * decode_ranks
    assert (decode.sent_bytes > 0) == (decode_ranks > 1)
    assert summarize(report)["decode"]["pool_bytes"] == sum(decode.pool_bytes)
    (line,) = (text for name, text in figures(report) if name == "decode")
    assert (f"over {decode_ranks} ranks with" in line) == (decode_ranks > 1)


@pytest.mark.parametrize(
    ("cp_size", "num_peers", "is_sharded"),
    [(size, peers, (size + peers) % 2 == 0) for size in (1, 2, 3) for peers in (1, 2, 3)],
)
def test_each_page_is_sent_once_to_its_place(cp_size, num_peers, is_sharded):
    rng = np.random.default_rng(cp_size * 10 + num_peers)
    pages = [rng.permutation(np.arange(3, 90))[:40].astype(np.int32) for _ in range(2)]
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    pools = [MHATokenToKVPool(size=90, page_size=1, **sizes) for _ in range(cp_size + num_peers)]
    sent = 0
    with contextlib.ExitStack() as stack:
        engines = [LocalEngine() for _ in pools]
        links = [Endpoint(*made, range(1), 1) for made in zip(engines, pools, strict=True)]
        peers = [stack.enter_context(link).peer() for link in links][cp_size:]
        for rank, pool in enumerate(pools[:cp_size]):
            numbers = torch.arange(91) * cp_size + rank if is_sharded else torch.arange(91)
            pool.get_kv_buffer(0)[0].copy_(numbers.view(91, 1, 1, 1))
            links[rank].connect(*peers)
            link = links[rank].send_pages(
                Delivery(*pages, ()), rank, cp_size, is_sharded=is_sharded
            )
            sent += link.num_bytes
    assert sent == 40 * 2 * 16 * 4
    for here, there in zip(*pages, strict=True):
        k, _ = pools[cp_size + there % num_peers].get_kv_buffer(0)
        assert (k[there // num_peers] == here).all()


PAGE, BLOCK, MAX_SEQUENCES = 4, 8, 6
KINDS = {"block_tokens": BLOCK, "vocab_size": 1 << 40, "seed": 0}


class Pools:
    """Pools of both sides hold tokens in place of rows; each prompt decodes one batch later."""

    def __init__(
        self, requests: list[Request], *, num_pages: int, budget: int, decode: int
    ) -> None:
        sizes = {"page_size": PAGE, "block_tokens": BLOCK}
        pages = decode_pool_pages(
            num_pages, **sizes, decode_tokens=decode, max_sequences=MAX_SEQUENCES
        )
        self.requests = requests
        self.prefill = np.full((num_pages + 1, PAGE), -1)
        self.decode = np.full((pages + 1, PAGE), -1)
        self.decode_cache = PrefixCache(pages, **sizes)
        self.handover = Handover(
            self.decode_cache, decode_tokens=decode, num_slots=2 * MAX_SEQUENCES
        )
        self.running: tuple[Continuation, ...] = ()
        cache = PrefixCache(num_pages, **sizes)
        self._batches = prefill_batches(
            requests, cache, token_budget=budget, max_sequences=MAX_SEQUENCES
        )

    def steps(self) -> Iterator[tuple[Batch, Delivery]]:
        """Yield each batch after its pages have been written and sent."""
        for batch in self._batches:
            for chunk in batch.chunks:
                if not self.handover.reserve(chunk):
                    self.release()
                    assert self.handover.reserve(chunk)
            tokens = [block_tokens_of(c.request, c.begin, c.end, **KINDS) for c in batch.chunks]
            written = batch.slots >= 0
            self.prefill.reshape(-1)[batch.slots[written]] = np.concatenate(tokens)[written]
            delivery = self.handover.deliver(batch)
            self.decode[delivery.dst_pages] = self.prefill[delivery.src_pages]
            self.release()
            self.running = delivery.continuations
            yield batch, delivery
        self.release()

    def release(self) -> None:
        for continuation in self.running:
            self.handover.release(continuation.request_index)
        self.running = ()


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 100),
    budget=st.integers(1, 300),
    decode=st.integers(1, 20),
    spare=st.integers(0, 60),
)
def test_every_prompt_is_there_when_its_decoding_begins(seed, budget, decode, spare):
    requests = scale_lengths(generate_trace(10, seed=seed), 64)
    longest = max(-(-request.input_length // PAGE) for request in requests)
    pools = Pools(requests, num_pages=longest + spare, budget=budget, decode=decode)
    done = []
    for batch, delivery in pools.steps():
        assert len(set(delivery.dst_pages.tolist())) == len(delivery.dst_pages)
        own: list[int] = []
        for c in delivery.continuations:
            request = requests[c.request_index]
            tokens = block_tokens_of(request, 0, request.input_length, **KINDS)
            found = pools.decode[c.page_ids].reshape(-1)[: request.input_length]
            np.testing.assert_array_equal(found, tokens)
            assert c.prompt_tokens == request.input_length
            assert c.num_tokens == min(decode, max(request.output_length, 1))
            assert len(c.page_ids) * PAGE >= c.prompt_tokens + c.num_tokens - 1
            assert np.cumsum(batch.extend_lens)[-1] > c.row
            own += c.page_ids[c.prompt_tokens // BLOCK * (BLOCK // PAGE) :].tolist()
            done.append(c.request_index)
        assert len(set(own)) == len(own)  # no two decode into one page
        slots = [c.slot for c in delivery.continuations]
        assert len(set(slots)) == len(slots)
    assert done == list(range(len(requests)))
    assert pools.decode_cache.num_free_pages + pools.decode_cache.num_idle_pages == (
        pools.decode_cache.num_pages
    )


@pytest.mark.parametrize("output_length", [0, 1])
def test_prefill_gives_a_token_in_any_case(output_length):
    pools = Pools([Request(0, 8, output_length, (1,))], num_pages=2, budget=8, decode=3)
    ((_, delivery),) = pools.steps()
    (continuation,) = delivery.continuations
    assert continuation.num_tokens == 1
    assert len(continuation.page_ids) == 2
