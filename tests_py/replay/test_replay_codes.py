# SPDX-License-Identifier: Apache-2.0
"""Replays of dense models whose caches have 8 bits: right on the codes, and near without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from cpattn.distributed import ContextParallel  # noqa: E402
from cpattn_lab.replay.dense.attention import DenseAttention, make_pool  # noqa: E402
from cpattn_lab.replay.dense.codes import error_over_codes, numbers_of  # noqa: E402
from cpattn_lab.replay.dense.model import DenseConfig  # noqa: E402
from cpattn_lab.replay.footprint import token_bytes  # noqa: E402
from cpattn_lab.traffic.trace import generate_trace, scale_lengths  # noqa: E402
from support.replay.replay_in_one_process import DECODE, InOneProcess, one_rank  # noqa: E402
from support.replay.replay_models import SMALL  # noqa: E402

CODES = ("fp8", "fp8_e5m2", "int8")
WIDE = replace(SMALL, head_dim=32, vocab_size=256)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def bytes_of(config: DenseConfig) -> int:
    return 2 * config.num_kv_heads * (config.head_dim + 2 * (config.kv_dtype == "int8"))


@pytest.mark.parametrize("kv_dtype", CODES)
def test_tokens_decoded_over_codes(kv_dtype):
    """Codes and scales are sent, and decoding reads them."""
    config = replace(WIDE, kv_dtype=kv_dtype)
    requests = scale_lengths(generate_trace(12, seed=2), 64)
    with InOneProcess(config, pp_size=2, cp_size=2) as system:
        system.run(requests)
    checker = system.checker
    assert checker.num_tokens == sum(min(DECODE, request.output_length) for request in requests)
    assert checker.num_wrong == 0
    assert 0 < checker.decode_error <= checker.tolerance
    sent = sum(-(-r.input_length // 4) for r in requests) - system.handover.cached_tokens // 4
    assert system.num_bytes == sent * 4 * config.num_layers * bytes_of(config)
    assert token_bytes(config) == bytes_of(config)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_the_oracle_on_codes_sees_what_is_wrong(kv_dtype):
    """A page changed after attention, which the tolerance for codes might swallow."""
    config = replace(WIDE, kv_dtype=kv_dtype)
    pool = make_pool(config, 8, 4, range(1))
    assert all(x.isnan().all() for x in numbers_of(pool, 0)), "nobody wrote these slots"
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 32, 2, 32, generator=generator).unbind()
    q = torch.randn(3, 4, 32, generator=generator)
    v[:, :, 3] = 0  # of which not even a rounding is explained
    pool.set_kv_buffer(0, list(range(4, 36)), k, v)
    tables = np.arange(1, 9, dtype=np.int32)[None].repeat(3, 0)
    lens = np.array([30, 5, 32])

    def attended() -> torch.Tensor:
        outs = []
        numbers = [x.flatten(0, 1)[4:] for x in numbers_of(pool, 0)]
        for row, length in zip(q.double(), lens, strict=True):
            keys, values = (x[:length].repeat_interleave(2, 1) for x in numbers)
            weights = torch.einsum("hd,khd->hk", row, keys).mul(32**-0.5).softmax(-1)
            outs.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(outs).float()

    out = attended()
    assert error_over_codes(config, pool, 0, q, out, tables, lens) < 1
    pool.set_kv_buffer(0, [33], k[:1] * 1.5, v[:1] * 1.5)
    assert error_over_codes(config, pool, 0, q, out, tables, lens) > 1
    out = attended()
    out[0, 0, 0] = torch.nan
    assert error_over_codes(config, pool, 0, q, out, tables, lens) == np.inf


def test_ranks_without_rows_have_no_error():
    config = replace(WIDE, kv_dtype="int8")
    with one_rank() as group:
        attention = DenseAttention(config, ContextParallel(group, page_size=4), 8, range(2))
        empty, tables = torch.empty(0, 4, 32), np.empty((0, 2), np.int32)
        lens = np.empty(0, np.int64)
        assert error_over_codes(config, attention.pool, 0, empty, empty, tables, lens) == 0
