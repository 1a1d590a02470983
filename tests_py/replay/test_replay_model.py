# SPDX-License-Identifier: Apache-2.0
"""The decoder, the check of its results, and the torch baseline, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cpattn.replay.dense.check import Checker, dense_attention, tolerance  # noqa: E402
from cpattn.replay.model import Decoder, Head, stage_layers  # noqa: E402
from cpattn.traffic.prefix_cache import PrefixCache  # noqa: E402
from cpattn.traffic.scheduler import prefill_batches  # noqa: E402
from cpattn.traffic.trace import generate_trace, scale_lengths  # noqa: E402
from support.replay.replay_models import SMALL  # noqa: E402

PAGE_SIZE = 4


def test_rows_of_the_last_layer_are_the_rows_of_the_whole():
    model = Decoder(SMALL)
    tokens, positions = torch.arange(40) % SMALL.vocab_size, torch.arange(40)
    rows = torch.tensor([0, 7, 39])

    def attention(at: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda _, q, k, v: dense_attention(q, k, v, at)

    whole = model(tokens, positions, attention(positions))
    some = model(tokens, positions, attention(rows), rows=rows)
    torch.testing.assert_close(some, whole[rows], rtol=0, atol=tolerance(SMALL))


@pytest.mark.parametrize(("pp_size", "sizes"), [(1, [4]), (2, [2, 2]), (3, [2, 1, 1])])
def test_stages_one_after_the_other_are_the_decoder(pp_size, sizes):
    config = replace(SMALL, num_layers=4)
    tokens, positions = torch.arange(20) % config.vocab_size, torch.arange(20)
    called = []

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        called.append(layer)
        return dense_attention(q, k, v, positions)

    stages = stage_layers(config.num_layers, pp_size)
    assert [len(stage) for stage in stages] == sizes
    x = tokens
    for layers in stages:
        x = Decoder(config, layers)(x, positions, attention)
    assert called == [0, 1, 2, 3]
    assert torch.equal(x, Decoder(config)(tokens, positions, attention))


def test_logits_do_not_repeat_the_token():
    head = Head(SMALL)
    hidden = Decoder(SMALL)(
        torch.arange(64), torch.zeros(64), lambda _, q, k, v: dense_attention(q, k, v, None)
    )
    logits = head(hidden)
    assert logits.dtype == torch.float32
    assert 0.5 < logits.std() < 2
    assert (logits.argmax(dim=-1) == torch.arange(64)).sum() < 8
    assert len(set(logits.argmax(dim=-1).tolist())) > 8


def test_sampled_rows_cover_every_chunk():
    checker = Checker(SMALL, block_tokens=8, rows_per_chunk=5)
    requests = scale_lengths(generate_trace(6), 64)
    cache = PrefixCache(800, page_size=PAGE_SIZE, block_tokens=8)
    for batch in prefill_batches(requests, cache, token_budget=70):
        rows = checker.sample_rows(batch)
        ends = np.cumsum(batch.extend_lens)
        assert set(ends - 1) | set(ends[:-1]) | {0} <= set(rows)
        assert len(rows) == sum(min(5, length) for length in batch.extend_lens)
