# SPDX-License-Identifier: Apache-2.0
"""Batches for the indexer whose scores are exact in float32, and their top-k in float64: products
and sums of small integers and powers of two are exact, and many are equal."""

from typing import Any

import numpy as np
import torch

import cpattn
from cpattn import reference
from support.cases import Case, shuffled_tables, strided
from support.sparse.topk_cases import expected_topk
from support.tolerances import assert_close, indexer_units, to_float64

KEY_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")
ROW_FORMS = ("[pages, page, D]", "[pages, page, 1, D]", "[slots, 1, D]")
PACKED_FORMS = ("[pages, bytes]", "[pages, page, D + 4]", "[pages, page, 1, D + 4]")


def scores_of(q, weights, keys):
    """Return sum_h weights[h] * relu(q[h] . k) of one query, for every key."""
    return weights.astype(np.float64) @ np.maximum(q.astype(np.float64) @ keys.T, 0)


def integers(rng, shape, low=-2, high=2):
    return rng.integers(low, high + 1, shape).astype(np.float32)


def in_form(rows, scales, form, page_size, is_packed):
    """Return rows [..., dim] and scales [..., 1] of all slots as a cache in a form, and scales."""
    shapes = ((-1, page_size), (-1, page_size, 1), (-1, 1))
    if not is_packed:
        shape = shapes[ROW_FORMS.index(form)]
        return rows.view(*shape, rows.shape[-1]), scales.view(shape)
    parts = [x.view(torch.uint8).reshape(-1, page_size, x.shape[-1] * x.element_size())
             for x in (rows, scales)]  # fmt: skip
    packed = torch.cat([part.flatten(1) for part in parts], 1)
    if form in PACKED_FORMS[1:]:
        packed = packed.unflatten(1, (*shapes[PACKED_FORMS.index(form) - 1][1:], -1))
    return packed, None


class IndexerBatch:
    def __init__(
        self, extend_lens, prefix_lens, cp_size=1, strategy="zigzag", convention="baked", *,
        dtype="bfloat16", form=ROW_FORMS[0], scaled=False, heads=3, dim=32, page_size=16, topk=8,
        seed=0,
    ):  # fmt: skip
        self.extend_lens, self.prefix_lens = list(extend_lens), list(prefix_lens)
        self.kv_lens = [e + p for e, p in zip(extend_lens, prefix_lens, strict=True)]
        self.page_size, self.topk, self.dim, self.dtype = page_size, topk, dim, dtype
        self.metadata = cpattn.build_cp_metadata_all_ranks(
            extend_lens, self.kv_lens, cp_size=cp_size, strategy=strategy,
            kv_len_convention=convention,
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        self.q = integers(rng, (sum(extend_lens), heads, dim))
        self.weights = integers(rng, (sum(extend_lens), heads), -3, 4)
        self.keys = [integers(rng, (n, dim)) for n in self.kv_lens]
        self.scales = [2 ** integers(rng, n, -1, 1) if scaled else np.ones(n) for n in self.kv_lens]
        self.block_tables, self.num_pages = shuffled_tables(
            Case(q_lens=self.extend_lens, kv_lens=self.kv_lens, page_size=page_size), rng
        )
        self.cache, self.k_scale = self.make_cache(form, scaled)

    @property
    def q_dtype(self):
        return getattr(torch, "float8_e4m3fn" if self.dtype == "uint8" else self.dtype)

    def in_pages(self, per_sequence, width, fill):
        pages = torch.full((self.num_pages, self.page_size, width), fill)
        for table, rows in zip(self.block_tables, per_sequence, strict=True):
            for token, row in enumerate(rows):
                page, slot = table[token // self.page_size], token % self.page_size
                pages[page, slot] = torch.tensor(row)
        return pages

    def make_cache(self, form, scaled):
        rows = self.in_pages(self.keys, self.dim, -77.0 if self.dtype == "int8" else torch.nan)
        scales = self.in_pages(self.scales, 1, torch.nan)
        is_packed = self.dtype == "uint8"
        cache, k_scale = in_form(rows.to(self.q_dtype), scales, form, self.page_size, is_packed)
        return cache, k_scale if scaled else None

    def expected(self):
        """Return [tokens, topk] in the order of the whole batch, without context parallelism."""
        tops, row = np.empty((len(self.q), self.topk), np.int32), 0
        for keys, scales, extend, prefix in zip(
            self.keys, self.scales, self.extend_lens, self.prefix_lens, strict=True
        ):
            for position in range(prefix, prefix + extend):
                seen = slice(position + 1)
                scores = scores_of(self.q[row], self.weights[row], keys[seen]) * scales[seen]
                (tops[row],) = expected_topk([scores], [len(scores)], self.topk)
                row += 1
        return tops

    def slots(self):
        """Return the slots [tokens, topk] that the indexer of one process selects."""
        sequence = np.repeat(np.arange(len(self.extend_lens)), self.extend_lens)[:, None]
        chosen = self.expected()
        pages = self.block_tables[sequence, np.maximum(chosen, 0) // self.page_size]
        slots = pages * self.page_size + chosen % self.page_size
        return np.where(chosen < 0, -1, slots).astype(np.int32)

    def shard(self, metadata, pad_rows=0):
        """Return the rank's q and weights, followed by rows of NaN (of -77 in int8)."""
        local = metadata.local_q_indices
        q, weights = torch.from_numpy(self.q[local]), torch.from_numpy(self.weights[local])
        fill = -77.0 if self.dtype == "int8" else torch.nan
        q = torch.cat([q, torch.full((pad_rows, *q.shape[1:]), fill)]).to(self.q_dtype)
        return q, torch.cat([weights, torch.full((pad_rows, weights.shape[1]), torch.nan)])

    def run(self, metadata, q=None, weights=None, **options):
        if q is None:
            q, weights = self.shard(metadata)
        defaults = {
            "block_tables": self.block_tables,
            "page_size": self.page_size,
            "topk": self.topk,
            "k_scale": self.k_scale,
        }
        cache = options.pop("cache", self.cache)
        return cpattn.sparse.cp_indexer_topk(q, cache, weights, metadata, **defaults | options)

    def check(self, pad_rows=0, **options):
        """Check that rows of every rank equal rows of the whole batch, and pad rows are empty."""
        expected = self.expected()
        for metadata in self.metadata:
            local = metadata.local_q_indices
            out = self.run(metadata, *self.shard(metadata, pad_rows), **options).numpy()
            assert out.shape == (len(local) + pad_rows, self.topk)
            np.testing.assert_array_equal(out[: len(local)], expected[local])
            assert np.all(out[len(local) :] == -1)


# Inputs of the indexer without a batch, and their expected results.


def values(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Return random numbers of a dtype in a part of a larger tensor; int8 has its whole range."""
    rng = np.random.default_rng(seed)
    if dtype == "int8":
        return torch.from_numpy(rng.integers(-128, 128, [*shape[:-1], shape[-1] + 3], np.int8))[
            ..., 1 : shape[-1] + 1
        ]
    x = torch.from_numpy(rng.standard_normal(shape, np.float32)).to(getattr(torch, dtype))
    if dtype == "float8_e4m3fn":
        return torch.stack([x, x], -2)[..., 0, :]
    return strided(shape, x.dtype).copy_(x)


def make_inputs(
    num_queries: int = 7,
    num_keys: int = 333,
    *,
    heads: int = 3,
    dim: int = 64,
    dtype: str = "bfloat16",
    scales: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """Return arguments by name, with ranges of all lengths, also empty and inverted ones."""
    rng = np.random.default_rng(seed)
    ks, ke = rng.integers(0, num_keys + 1, (2, num_queries))
    ks[:1], ke[:1] = 0, num_keys
    inputs = {
        "q": values((num_queries, heads, dim), dtype, seed + 1),
        "k": values((num_keys, dim), dtype, seed + 2),
        "weights": values((num_queries, heads), "float32", seed + 3),
        "ks": ks,
        "ke": ke,
    }
    if scales:
        inputs["k_scale"] = torch.from_numpy(rng.uniform(0.1, 2, num_keys).astype(np.float32))
    return inputs


def expected_logits(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the oracle's logits, and their magnitudes: logits with all products positive."""
    exact = inputs | {name: to_float64(inputs[name]) for name in ("q", "k", "weights")}
    positive = exact | {name: np.abs(exact[name]) for name in ("q", "k", "weights")}
    magnitude = reference.indexer_logits(**positive)
    return reference.indexer_logits(**exact), np.maximum(magnitude, 0)


def assert_logits(logits: Any, inputs: dict[str, Any], expected: Any = None) -> None:
    units = indexer_units(inputs["q"].shape[1])
    assert_close(logits, *(expected or expected_logits(inputs)), "indexer", "float32", units)


def best_keys(logits: Any, inputs: dict[str, Any], topk: int, in_order: bool) -> np.ndarray:
    lengths = np.subtract(inputs["ke"], inputs["ks"])
    return expected_topk(logits, lengths, topk, inputs["ks"], sorted=in_order)
