# SPDX-License-Identifier: Apache-2.0
"""Prefill in some processes, decoding in another one: the tokens are those of one process."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Console = pytest.importorskip("rich.console").Console

import torch.distributed as dist  # noqa: E402

import cpattn  # noqa: E402
from cpattn._workers import WorkerError  # noqa: E402
from cpattn.replay.dense.model import DenseConfig  # noqa: E402
from cpattn.replay.disaggregation.check import DecodeChecker, SparseDecodeChecker  # noqa: E402
from cpattn.replay.disaggregation.endpoint import (  # noqa: E402
    Endpoint,
    Transfer,
    require_engine,
)
from cpattn.replay.disaggregation.handover import Delivery  # noqa: E402
from cpattn.replay.driver import replay  # noqa: E402
from cpattn.replay.records import DecodeReport, ReplayOptions, ReplayReport  # noqa: E402
from cpattn.replay.report.summary import print_report  # noqa: E402
from cpattn.traffic.trace import generate_trace, scale_lengths  # noqa: E402
from support.replay.replay_in_one_process import DECODE, InOneProcess  # noqa: E402
from support.replay.replay_models import SMALL_DSA  # noqa: E402
from support.transfer.transfer_processes import requires_mooncake  # noqa: E402

SMALL = DenseConfig(
    num_layers=4, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96, vocab_size=256
)
SPARSE = replace(SMALL_DSA, vocab_size=256)
FP8_ROWS = replace(
    SPARSE,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
    dtype="bfloat16",
    kv_dtype="fp8",
)
OPTIONS = ReplayOptions(
    model=SMALL,
    cp_size=1,
    page_size=4,
    token_budget=300,
    pool_tokens=1000,
    scale_lengths=64,
    num_threads=1,
    check_rows=4,
    torch_baseline=False,
    timeout_seconds=60,
    decode_tokens=6,
)


pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.slow]


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "layers", "pp_size", "cp_size", "page_size"),
    [
        ("float32", 6, 1, 1, 4),
        ("float32", 6, 2, 2, 8),
        ("bfloat16", 6, 3, 1, 8),
        ("float32", 4, 3, 2, 4),
        ("float32", 4, 4, 3, 1),
    ],
)
def test_tokens_are_those_of_one_process(
    group: Any, dtype: str, layers: int, pp_size: int, cp_size: int, page_size: int
) -> None:
    config = replace(SMALL, num_layers=layers, dtype=dtype)
    system = InOneProcess(group, config, pp_size=pp_size, cp_size=cp_size, page_size=page_size)
    requests = scale_lengths(generate_trace(12, seed=2), 64)
    system.run(requests)
    system.close()
    lengths = [min(DECODE, request.output_length) for request in requests]
    checker = system.checker
    assert checker.num_tokens == sum(lengths)
    assert checker.num_wrong == 0
    assert checker.num_near_ties == 0 or dtype != "float32"
    assert 0 < checker.decode_error <= checker.tolerance
    assert max(checker.errors.values()) <= checker.tolerance
    assert system.handover.cached_tokens > 0
    sent = sum(-(-r.input_length // page_size) for r in requests)
    sent -= system.handover.cached_tokens // page_size
    assert system.num_bytes == sent * page_size * layers * 2 * 2 * 16 * config.torch_dtype.itemsize


Send = Callable[[Endpoint, Delivery, int, int], Transfer]


def without(delivery: Delivery, keep: np.ndarray) -> Delivery:
    return replace(delivery, src_pages=delivery.src_pages[keep], dst_pages=delivery.dst_pages[keep])


def one_page_less(send: Send, link: Endpoint, delivery: Delivery, *rank: int) -> Transfer:
    return send(link, without(delivery, np.arange(len(delivery.dst_pages) - 1)), *rank)


def no_partial_page(send: Send, link: Endpoint, delivery: Delivery, *rank: int) -> Transfer:
    partial = [c.page_ids[c.prompt_tokens // 4] for c in delivery.continuations]
    return send(link, without(delivery, ~np.isin(delivery.dst_pages, partial)), *rank)


def swapped_layers(send: Send, link: Endpoint, *arguments: Any) -> Transfer:
    (layout,) = link._peer_layouts
    entries = list(layout.entries)
    first, second = (i for i, e in enumerate(entries) if e.kind == "v" and e.layer_id < 2)
    swapped = entries[second].addr, entries[first].addr
    for i, addr in zip((first, second), swapped, strict=True):
        e = entries[i]
        entries[i] = cpattn.transfer.KVEntry(
            e.layer_id, e.kind, e.is_draft, addr, e.nbytes, e.item_len
        )
    link._peer_layouts = [cpattn.transfer.KVLayout(entries, layout.page_size)]
    try:
        return send(link, *arguments)
    finally:
        link._peer_layouts = [layout]


def nothing_of_rank_0(send: Send, link: Endpoint, delivery: Delivery, *rank: int) -> Transfer:
    return send(link, delivery if rank[0] else without(delivery, np.arange(0)), *rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrong", [one_page_less, no_partial_page, swapped_layers, nothing_of_rank_0]
)
def test_the_check_sees_wrong_sending(
    group: Any, monkeypatch: pytest.MonkeyPatch, wrong: Any, dtype: str
) -> None:
    send = Endpoint.send_pages
    monkeypatch.setattr(
        Endpoint, "send_pages", lambda link, *arguments: wrong(send, link, *arguments)
    )
    config = replace(SMALL, dtype=dtype)
    system = InOneProcess(group, config, pp_size=1, cp_size=2, page_size=4)
    system.run(scale_lengths(generate_trace(5, seed=2), 64))
    system.close()
    assert system.checker.decode_error > system.checker.tolerance
    assert system.checker.num_wrong > 0


def test_the_check_sees_pages_of_another_prompt(group: Any) -> None:
    """Written before, so that no NaN gives them away."""

    def harm(system: InOneProcess) -> None:
        for layer in range(4):
            for buffer in system.decode._pool.get_kv_buffer(layer):
                buffer[3] = buffer[2]

    system = InOneProcess(group, SMALL, pp_size=1, cp_size=1, page_size=4)
    system.run(scale_lengths(generate_trace(3, seed=2), 64), harm)
    system.close()
    assert system.checker.decode_error > system.checker.tolerance
    assert system.checker.num_wrong > 0


@pytest.mark.parametrize("page_size", [4, 1])
@pytest.mark.parametrize(("model", "token_bytes"), [(SPARSE, (64 + 16 + 32) * 4), (FP8_ROWS, 788)])
def test_tokens_of_a_sparse_model(group: Any, model: Any, token_bytes: int, page_size: int) -> None:
    """Latent rows, rotary parts and keys of the indexer arrive, and each token's keys are right."""
    system = InOneProcess(group, model, pp_size=1, cp_size=2, page_size=page_size)
    requests = scale_lengths(generate_trace(12, seed=2), 64)
    system.run(requests, lambda _: None)
    system.close()
    checker = system.checker
    assert isinstance(checker, SparseDecodeChecker)
    assert checker.num_tokens == sum(min(DECODE, request.output_length) for request in requests)
    assert checker.num_wrong == 0
    assert checker.num_near_ties == 0 or model is FP8_ROWS
    assert 0 < checker.decode_error <= checker.tolerance
    assert max(checker.errors.values()) <= checker.tolerance
    sent = sum(-(-r.input_length // page_size) for r in requests)
    sent -= system.handover.cached_tokens // page_size
    assert system.num_bytes == sent * page_size * token_bytes


@pytest.mark.parametrize(
    ("model", "kind"),
    [*((SPARSE, kind) for kind in ("k", "v", "index_k")), (FP8_ROWS, "k"), (FP8_ROWS, "index_k")],
)
def test_the_check_sees_a_page_of_a_sparse_model(group: Any, model: Any, kind: str) -> None:
    def harm(system: InOneProcess) -> None:
        pages = getattr(system.decode._pool, f"{kind}_buffer")[0]
        pages[3] = pages[2]

    system = InOneProcess(group, model, pp_size=1, cp_size=1, page_size=4)
    system.run(scale_lengths(generate_trace(3, seed=2), 64), harm)
    system.close()
    assert system.checker.decode_error > system.checker.tolerance


def test_near_ties_are_not_wrong() -> None:
    checker = DecodeChecker(replace(SMALL, dtype="bfloat16"), block_tokens=8, rows_per_chunk=4)
    logits = torch.zeros(3, 8)
    logits[:, 5] = torch.tensor([0.0, 0.9, 1.1]) * checker.margin
    checker._compare_tokens([5, 5, 5], logits)
    assert (checker.num_tokens, checker.num_wrong, checker.num_near_ties) == (3, 0, 0)
    checker._compare_tokens([4, 4, 4], logits)
    assert (checker.num_tokens, checker.num_wrong, checker.num_near_ties) == (6, 1, 1)


@pytest.fixture
def engine() -> None:
    requires_mooncake()


@pytest.mark.usefixtures("engine")
def test_an_engine_is_tried_without_a_trace(capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    require_engine()
    assert os.environ == before
    assert capfd.readouterr() == ("", "")


def children() -> dict[str, Any]:
    return {process.name: process for process in multiprocessing.active_children()}


@pytest.mark.usefixtures("engine")
def test_a_replay_over_the_engine() -> None:
    options = replace(OPTIONS, pp_size=2, cp_size=2)
    requests = generate_trace(20, seed=2)
    report = replay(requests, options)
    assert report.passed
    decode = report.decode
    assert decode is not None
    assert report.tolerance is not None
    assert sum(batch.num_chunks for batch in report.batches) > 0
    assert [r.index for r in decode.requests] == list(range(20))
    wanted = [min(6, -(-request.output_length // 64)) for request in requests]
    assert [len(r.tokens) for r in decode.requests] == wanted
    assert decode.checked_tokens == sum(wanted)
    assert decode.wrong_tokens == decode.near_ties == 0
    assert 0 < decode.max_error <= report.tolerance
    assert len({token for r in decode.requests for token in r.tokens}) > 10
    assert decode.cached_tokens > 0
    assert len(decode.transfers) == len(report.batches)
    page_bytes = 4 * 2 * 2 * 16 * SMALL.num_layers * 4
    for transfer in decode.transfers:
        assert transfer.num_bytes == transfer.num_pages * page_bytes
        assert 0 < transfer.num_blocks <= transfer.num_pages * SMALL.num_layers * 2
        assert 0 < transfer.plan_seconds < transfer.seconds
    text = io.StringIO()
    print_report(report, "a title", Console(file=text, width=120))
    for word in ("KV transfer", "second token", "send", "next tokens are those of one process"):
        assert word in text.getvalue()
    assert not children()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("model", "token_bytes"),
    [(replace(SPARSE, dtype="bfloat16"), (64 + 16 + 32) * 2), (FP8_ROWS, 656 + 132)],
)
def test_a_sparse_replay_over_the_engine(model: Any, token_bytes: int) -> None:
    report = replay(generate_trace(8, seed=2), replace(OPTIONS, model=model, cp_size=2))
    assert report.passed
    assert report.decode is not None
    assert report.decode.num_tokens > 8
    assert report.decode.checked_tokens == report.decode.num_tokens + 8
    assert 0 < report.swapped_keys < report.checked_keys / 10
    for transfer in report.decode.transfers:
        assert transfer.num_bytes == transfer.num_pages * 4 * token_bytes
    assert not children()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("victim", "name"), [("the-decode-process", "the decode process"), ("rank-0", "rank 0")]
)
def test_a_killed_process_ends_all(victim: str, name: str) -> None:
    def kill(done: int, total: int, what: str) -> None:
        if what == "batch 2":
            pid = children()[f"cpattn-{victim}"].pid
            os.kill(pid, signal.SIGKILL)

    message = rf"^{name} \(process \d+\) was killed by SIGKILL$"
    with pytest.raises(WorkerError, match=message):
        replay(generate_trace(20, seed=2), OPTIONS, progress=kill)
    assert not children()


def test_wrong_tokens_fail_the_report() -> None:
    report = ReplayReport(OPTIONS, {}, 1, 1, 0, tolerance=0.1, decode=DecodeReport())
    assert report.passed
    assert report.decode is not None
    report.decode.wrong_tokens = 1
    assert not report.passed
    report.decode = DecodeReport(max_error=0.2)
    assert not report.passed
