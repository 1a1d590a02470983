# SPDX-License-Identifier: Apache-2.0
"""No wrong row of K or V can hide behind thousands of keys: results show the weight of each key.

`probes` explains the method. Tests run with every instruction set, up to 131,079 keys.
"""

import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cpattn import reference
from support import probes
from support.attention_cases import plan_of, run
from support.cases import DTYPES
from support.tolerances import EPS, TOLERANCES, Expected, assert_attended, assert_close

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Size:
    """Few rows of queries behind many keys, and the path that computes them."""

    kv_len: int
    tokens: int
    group: int
    kv_heads: int
    v_head_dim: int
    page_size: int
    head_dim: int = 32

    def __str__(self) -> str:
        return f"{self.kv_len} keys, {self.tokens} x {self.group * self.kv_heads} rows"


PREFILL = [Size(2051, 8, 4, 2, 64, 16), Size(131079, 8, 4, 1, 256, 128)]
DECODE = [Size(2051, 1, 16, 2, 128, 1), Size(131079, 1, 16, 1, 512, 256)]


class Probe:
    """Keys and values in shuffled pages, queries at their end, and expected results."""

    def __init__(self, size: Size) -> None:
        self.size, rng = size, np.random.default_rng(size.kv_len)
        rows, n = size.tokens * size.group, size.kv_len
        owners = np.stack([probes.deal(n, rows, rng) for _ in range(size.kv_heads)], 1)
        # Only the last token sees the last key.
        last = slice(n - size.tokens, n)
        owners[last] = rows - size.group + owners[last] % size.group
        self.k = probes.key_rows(owners, size.head_dim, rng)
        self.columns = np.stack([probes.deal_columns(x, size.v_head_dim, rng) for x in owners.T], 1)
        numbers = np.arange(rows).reshape(size.tokens, 1, size.group)
        q = probes.query_rows(np.tile(numbers, (1, size.kv_heads, 1)), size.head_dim)
        self.q = q.reshape(size.tokens, -1, size.head_dim)
        pages = -(-n // size.page_size)
        self.tables = rng.permutation(pages + 2)[None, :pages].astype(np.int32)
        self.visible = np.arange(n) <= np.repeat(np.arange(n - size.tokens, n), size.group)[:, None]

    @functools.cached_property
    def expected(self) -> Expected:
        """Return results of the tokens, in float64."""
        size, parts = self.size, []
        for head in range(size.kv_heads):
            q, k, columns, counts = *self.of(head), self.visible
            result = probes.result_of(q, k, columns, size.v_head_dim, counts)
            parts.append([x.reshape(size.tokens, size.group, *x.shape[1:]) for x in result])
        return probes.expectation(*(np.concatenate(x, 1) for x in zip(*parts, strict=True)))

    def of(self, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return queries [rows, head_dim], keys and columns of one KV head."""
        size = self.size
        q = self.q.reshape(size.tokens, size.kv_heads, size.group, -1)[:, head]
        return q.reshape(-1, size.head_dim), self.k[:, head], self.columns[:, head]

    def inputs(self, dtype: str) -> dict[str, object]:
        """Return arguments of paged_attention."""
        size = self.size
        v = probes.value_rows(self.columns, size.v_head_dim)
        token = np.arange(size.kv_len)
        place = self.tables[0, token // size.page_size], token % size.page_size
        caches = []
        for rows in (self.k, v):
            shape = (self.tables.shape[1] + 2, size.page_size, *rows.shape[1:])
            cache = torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
            cache[place] = torch.from_numpy(rows).to(cache.dtype)
            caches.append(cache)
        return {
            "q": torch.from_numpy(self.q).to(caches[0].dtype),
            "k_cache": caches[0],
            "v_cache": caches[1],
            "q_lens": [size.tokens],
            "kv_lens": [size.kv_len],
            "block_tables": self.tables,
            "page_size": size.page_size,
            "scale": 1.0,
        }


@functools.lru_cache(maxsize=1)
def probe_of(size: Size) -> Probe:
    return Probe(size)


@pytest.fixture(scope="module", params=PREFILL + DECODE, ids=str)
def size(request):
    return request.param


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def made(size, dtype):
    """Make inputs and results once for all instruction sets and ways to attend."""
    probe = probe_of(size)
    return probe.inputs(dtype), probe.expected


def test_paged_attention(made, size, dtype, isa):
    """Keys are packed, or read in place for few rows; they are split or whole."""
    inputs, expected = made
    assert_attended(*run(inputs), expected, dtype)
    assert np.any(plan_of(inputs).items[:, 5] > 0)
    assert_attended(*run(inputs, batch_invariant=True), expected, dtype)


def test_each_key_is_more_than_roundings_explain(size):
    """A result that lacks a key, counts it twice or reads another is off by over two tolerances."""
    probe = probe_of(size)
    for head in range(size.kv_heads):
        share = probes.smallest_share(*probe.of(head), size.v_head_dim)
        for dtype in DTYPES:
            assert share > 2 * TOLERANCES["attention", dtype] * EPS[dtype]


def test_the_oracle_agrees():
    probe = probe_of(PREFILL[0])
    expected = probe.expected
    out, lse = reference.paged_attention(**probe.inputs("float32"))
    assert_close(out, expected.out, 1, "restated", "float64")
    assert_close(lse, expected.lse, 1, "restated", "float64")
