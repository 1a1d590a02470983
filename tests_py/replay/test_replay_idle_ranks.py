# SPDX-License-Identifier: Apache-2.0
"""Batches with fewer tokens than ranks: those without a row take part, and compute nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cpattn.replay.dense.model import DenseConfig  # noqa: E402
from cpattn.replay.driver import replay  # noqa: E402
from cpattn.replay.model import Decoder  # noqa: E402
from cpattn.replay.records import ReplayOptions  # noqa: E402
from cpattn.traffic.trace import Request  # noqa: E402
from support.replay.replay_models import SMALL_DSA  # noqa: E402
from support.transfer.transfer_processes import requires_mooncake  # noqa: E402

pytestmark = pytest.mark.slow


DENSE = DenseConfig(
    num_layers=2, hidden_size=64, num_heads=4, head_dim=16, intermediate_size=96, vocab_size=64
)
FP8 = replace(
    SMALL_DSA,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
    dtype="bfloat16",
    kv_dtype="fp8",
)
RAGGED_FP8 = replace(FP8, prefill_impl="flashmla_sparse")
OPTIONS = ReplayOptions(
    model=DENSE,
    page_size=4,
    pool_tokens=1000,
    scale_lengths=64,
    num_threads=1,
    check_rows=4,
    timeout_seconds=60,
)
# Of 1, 2, 5 and 9 tokens at 1/64 of the length; the last one repeats the first block of the third.
REQUESTS = [
    Request(0, 64, 128, (0,)),
    Request(0, 128, 128, (1,)),
    Request(0, 320, 128, (2,)),
    Request(0, 576, 128, (3, 4)),
]


def run(**changes: Any) -> None:
    report = replay(REQUESTS, replace(OPTIONS, **changes))
    assert report.passed
    assert report.new_tokens + report.hit_tokens == report.input_tokens == 17
    rows = [rank for batch in report.batches for rank in batch.rank_rows]
    assert 0 in rows or changes["cp_size"] == 1


@pytest.mark.parametrize(
    ("model", "cp_size", "strategy", "token_budget"),
    [
        pytest.param(DENSE, 2, "zigzag", 1, id="dense"),
        pytest.param(SMALL_DSA, 4, "interleave", 3, id="dsa"),
        pytest.param(DENSE, 1, "zigzag", 1, id="dense-alone"),
        pytest.param(DENSE, 4, "zigzag", 3, id="dense-zigzag"),
        pytest.param(DENSE, 4, "interleave", 3, id="dense-interleave"),
        pytest.param(DENSE, 4, "contiguous", 3, id="dense-contiguous"),
        pytest.param(SMALL_DSA, 4, "zigzag", 1, id="dsa-zigzag"),
        pytest.param(SMALL_DSA, 4, "contiguous", 3, id="dsa-contiguous"),
        pytest.param(FP8, 4, "zigzag", 3, id="fp8"),
        pytest.param(RAGGED_FP8, 4, "interleave", 1, id="fp8-ragged"),
    ],
)
def test_a_rank_may_have_nothing_to_do(
    model: Any, cp_size: int, strategy: str, token_budget: int
) -> None:
    run(model=model, cp_size=cp_size, strategy=strategy, token_budget=token_budget)


@pytest.mark.parametrize(
    ("model", "cp_size", "pp_size"), [(DENSE, 2, 1), (DENSE, 2, 2), (SMALL_DSA, 4, 1)]
)
def test_a_rank_of_prefill_may_have_nothing_to_do(model: Any, cp_size: int, pp_size: int) -> None:
    requires_mooncake()
    run(model=model, cp_size=cp_size, pp_size=pp_size, token_budget=1, decode_tokens=2)


def test_a_dense_layer_takes_no_rows() -> None:
    model = Decoder(DENSE)
    nothing = torch.empty(0, dtype=torch.int64)
    shapes = []

    def attention(layer: int, q: Any, k: Any, v: Any) -> Any:
        shapes.append([tuple(x.shape) for x in (q, k, v)])
        return torch.empty_like(q)

    assert model(nothing, nothing, attention).shape == (0, 64)
    assert shapes == [[(0, 4, 16), (0, 2, 16), (0, 2, 16)]] * 2
