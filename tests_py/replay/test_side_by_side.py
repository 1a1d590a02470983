# SPDX-License-Identifier: Apache-2.0
"""The check computes several prompts at once, each on its share of the CPUs, and samples rows.
Other tests are about the stages and the head of the decoder that it runs."""

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from cpattn import _core
from cpattn.scheduling.prefix_cache import PrefixCache
from cpattn.scheduling.scheduler import prefill_batches
from cpattn_lab.replay.dense import check
from cpattn_lab.replay.dense.check import Checker
from cpattn_lab.replay.model import stage_layers
from cpattn_lab.replay.side_by_side import side_by_side
from cpattn_lab.traffic.trace import generate_trace, scale_lengths
from support.replay.replay_models import SMALL
from support.tolerances import assert_logits_close

TINY = replace(SMALL, hidden_size=32, num_heads=2, num_kv_heads=1)


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4, "what was set before comes back"
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("sizes", "at_once", "workers"),
    [
        ([], 1, 0),
        ([5, 9, 2], 100, 3),
        ([5] * 9, 100, 4),
        ([5, 9, 2], 20, 2),
        ([5, 9, 2], 9, 1),
        ([7], 100, 1),
    ],
)
def test_items_share_the_cpus(sizes, at_once, workers):
    together = threading.Barrier(max(workers, 1))
    seen: set[int] = set()

    def compute(item: int) -> tuple[int, int, int]:
        if threading.get_ident() not in seen:  # each thread first waits for the others
            seen.add(threading.get_ident())
            together.wait(timeout=60)
        return item, torch.get_num_threads(), _core.default_num_threads()

    results = side_by_side(compute, range(len(sizes)), sizes, at_once=at_once)
    assert [item for item, _, _ in results] == list(range(len(sizes)))
    assert len(seen) == workers
    if workers > 1:
        assert {(own, ours) for _, own, ours in results} == {(4 // workers, 4 // workers)}


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_stops_the_others(error):
    stopped = threading.Event()
    computed = []

    def compute(item: int) -> None:
        computed.append(item)
        if item == 0:
            raise error("first")
        assert stopped.wait(60)

    with pytest.raises(error, match="first"):
        side_by_side(compute, range(64), [64 - i for i in range(64)], at_once=999, stop=stopped.set)
    assert len(computed) < 64


@pytest.mark.usefixtures("four_threads")
def test_the_check_of_a_prompt_does_not_depend_on_others():
    answers: list[list[Any]] = []
    for at_once in (1, check._TOKENS_AT_ONCE):
        checker = Checker(TINY, block_tokens=8, rows_per_chunk=4)
        checker._compare_rows = lambda _, rows: answers[-1].append(rows)
        answers.append([])
        with mock.patch.object(check, "_TOKENS_AT_ONCE", at_once):
            checker._finish(_prompts())
    for alone, together in zip(*answers, strict=True):
        assert_logits_close(together, alone)


def test_a_check_that_was_stopped_ends_at_the_next_layer():
    checker = Checker(TINY, block_tokens=8, rows_per_chunk=4)
    checker._stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        checker._finish(_prompts()[:1])


def _prompts() -> list[check.Prompt]:
    """Make prompts with their first and last rows sampled."""
    requests = scale_lengths(generate_trace(6, seed=1), 64)
    ends = [np.array([0, request.input_length - 1]) for request in requests]
    rows = np.empty((2, 32)), np.empty((2, 0), np.int32)
    return [(i, requests[i], [(0, positions, *rows)]) for i, positions in enumerate(ends)]


@pytest.mark.parametrize(("pp_size", "sizes"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1])])
def test_stages_have_as_many_layers(pp_size, sizes):
    assert [len(stage) for stage in stage_layers(4, pp_size)] == sizes


def test_sampled_rows_cover_every_chunk():
    checker = Checker(SMALL, block_tokens=8, rows_per_chunk=5)
    requests = scale_lengths(generate_trace(6), 64)
    cache = PrefixCache(800, page_size=4, block_tokens=8)
    for batch in prefill_batches(requests, cache, token_budget=70):
        rows = checker.sample_rows(batch)
        ends = np.cumsum(batch.extend_lens)
        assert set(ends - 1) | set(ends[:-1]) | {0} <= set(rows)
        assert len(rows) == sum(min(5, length) for length in batch.extend_lens)
