# SPDX-License-Identifier: Apache-2.0
"""Replays of sparse attention, and of dense models with caches of 8 bits, are checked."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from cpattn.scheduling.scheduler import Batch
from cpattn_lab.replay.dense.attention import make_pool
from cpattn_lab.replay.dense.codes import error_over_codes, numbers_of
from cpattn_lab.replay.dsa.check import RestrictedAttention, SparseChecker
from cpattn_lab.replay.dsa.model import DsaConfig, SparseInputs
from cpattn_lab.traffic.trace import generate_trace, scale_lengths
from support.replay.replay_in_one_process import InOneProcess
from support.replay.replay_models import FP8_DSA, RAGGED_DSA, SMALL, SMALL_DSA
from support.sparse.topk_cases import expected_topk

PAGE_SIZE, NUM_PAGES = 4, 251


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def checked(
    config: DsaConfig, spoil: Callable[[Batch, Any], None] = lambda batch, attention: None
) -> SparseChecker:
    """Replay twelve generated requests on one rank, whose caches `spoil` may change."""
    with InOneProcess(config, rows_per_chunk=8) as system:
        system.run(scale_lengths(generate_trace(12, seed=1), 64), spoil=spoil)
    return system.checker


@pytest.mark.parametrize(
    "config",
    [SMALL_DSA, replace(SMALL_DSA, dtype="bfloat16"), FP8_DSA, RAGGED_DSA],
    ids=["float32", "bfloat16", "fp8", "fp8 ragged"],
)
def test_errors_are_roundings(config):
    checker = checked(config)
    assert checker.num_rows > 100
    assert max(checker.errors.values()) <= checker.tolerance
    # A bound ten times the truth would miss mistakes.
    assert max(checker.errors.values()) > checker.tolerance / 10
    assert (checker.num_swapped > 0) == (config.dtype != "float32")


@pytest.mark.parametrize(
    ("config", "buffer", "is_written"),
    [
        (SMALL_DSA, "pool.k_buffer", True),
        (SMALL_DSA, "pool.v_buffer", False),
        (SMALL_DSA, "pool.index_k_buffer", True),
        (SMALL_DSA, "pool.index_k_buffer", False),
        (FP8_DSA, "kv", False),
        (FP8_DSA, "kv", True),
        (FP8_DSA, "index_k", False),
    ],
)
def test_the_check_sees_a_spoiled_page(config, buffer, is_written):
    """A spoiled page has the rows of another page, or none."""

    def spoil(batch: Batch, attention: Any) -> None:
        pages = attrgetter(buffer)(attention._pools).view(NUM_PAGES, -1)
        nothing = 0xFF if pages.dtype == torch.uint8 else torch.nan
        for chunk, table in zip(batch.chunks, batch.block_tables, strict=True):
            if chunk.begin >= 4 * PAGE_SIZE:
                first, second = torch.from_numpy(table[:4]).long().chunk(2)
                pages[first] = pages[second] if is_written else nothing

    checker = checked(config, spoil)
    assert max(checker.errors.values()) > checker.tolerance


def inputs_of(config: DsaConfig, tokens: int, seed: int = 0) -> SparseInputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = SparseInputs(
        q=(tokens, config.num_heads, config.latent_dim),
        latent=(tokens, 1, config.latent_dim),
        index_q=(tokens, config.index_heads, config.index_head_dim),
        index_k=(tokens, config.index_head_dim),
        index_weights=(tokens, config.index_heads),
    )
    return SparseInputs(*(torch.randn(shape, generator=generator) for shape in shapes))


def best_keys(inputs: SparseInputs, topk: int) -> Any:
    """Return the best keys, int32 [tokens, topk], ascending, with -1 in the tail."""
    products = torch.einsum("thd,jd->thj", inputs.index_q.double(), inputs.index_k.double())
    scores = torch.einsum("th,thj->tj", inputs.index_weights.double(), products.relu())
    return expected_topk(scores, range(1, len(scores) + 1), topk, sorted=False)


@pytest.mark.parametrize("kind", ["right", "another key", "twice", "too few", "later", "far"])
def test_keys_are_checked(kind):
    inputs = inputs_of(SMALL_DSA, 60)
    chosen = best_keys(inputs, SMALL_DSA.topk)
    row = 40
    others = np.setdiff1d(np.arange(row + 1), chosen[row])
    wrong = {"another key": others[0], "twice": chosen[row, 0], "too few": -1, "later": 41}
    chosen[row, 5] = {"right": chosen[row, 5], "far": 10**6, **wrong}[kind]
    operators = RestrictedAttention(SMALL_DSA, np.arange(60), chosen)
    out = operators.attend(0, inputs)
    assert out.shape == (60, SMALL_DSA.num_heads, SMALL_DSA.kv_lora_rank)
    assert np.flatnonzero(operators.wrong_rows).tolist() == ([] if kind == "right" else [row])


CODES = ("fp8", "fp8_e5m2", "int8")
WIDE = replace(SMALL, head_dim=32, vocab_size=256)


@pytest.mark.parametrize("kv_dtype", CODES)
def test_the_oracle_on_codes_sees_what_is_wrong(kv_dtype):
    """A page that changes after attention is seen, although the tolerance for codes is large."""
    config = replace(WIDE, kv_dtype=kv_dtype)
    pool = make_pool(config, 8, 4, range(1))
    assert all(x.isnan().all() for x in numbers_of(pool, 0)), "nobody wrote these slots"
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 32, 2, 32, generator=generator).unbind()
    q = torch.randn(3, 4, 32, generator=generator)
    v[:, :, 3] = 0  # here not even a rounding is allowed
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
