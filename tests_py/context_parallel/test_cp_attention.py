# SPDX-License-Identifier: Apache-2.0
"""Attention over any number of ranks has the bits of one process: with windows, masks and sinks,
over caches of 8-bit codes with every kind of scale, and over latents, whose rope may be apart."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from support.cases import (
    DTYPES,
    Case,
    assert_attention,
    dense,
    make_inputs,
    numbers,
    packed,
    random_bias,
)
from support.cp_batches import STRATEGIES, Batch, on_ranks
from support.examples import examples

EXTENDS, PREFIXES = (13, 1, 40, 0, 5), (20, 3, 33, 9, 0)
LENS = list(zip(EXTENDS, PREFIXES, strict=True))
KV_LENS = tuple(map(sum, LENS))
CP_SIZES = (1, 2, 3, 8, 16)


def random_masks(seed: int = 0, shown: float = 0.4, lens=LENS) -> list[np.ndarray]:
    """Return a mask for each sequence; some rows show no key."""
    rng = np.random.default_rng(seed)
    masks = [rng.random((new, cached + new)) < shown for new, cached in lens]
    for mask in masks:
        mask[::7] = False
    return masks


SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
OPTIONS = {
    "window over all": {"window": 1 << 50},
    "window on both sides": {"window": (5, 9), "causal": False},
    "mask within a window": {"custom_mask": dense(random_masks(2)), "window": 9},
    "bias": {"bias": random_bias(EXTENDS, KV_LENS, 4)},
    "bias of all": {"bias": numbers(1, 4, 40, 73), "causal": False},
    "ALiBi": {"alibi_slopes": numbers(5, 4)},
    "relative bias": {"relative_bias": numbers(4, 41), "causal": False, "window": (40, 9)},
    "everything hidden": {"custom_mask": dense(random_masks(shown=0)), "causal": False},
    "all": {"window": 11, "softcap": 4.0, "sinks": SINKS}
    | {"custom_mask": dense(random_masks(3, 0.8))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_have_the_bits_of_one_process(name):
    dtype = DTYPES[list(OPTIONS).index(name) % 3]
    sizes = {"dtype": dtype, "head_dim": 32, "options": OPTIONS[name]}
    alone = Batch(EXTENDS, PREFIXES, 1, "zigzag", **sizes)
    whole = alone.whole()
    assert_attention(*whole, alone.inputs)
    for cp_size, strategy in itertools.product(CP_SIZES, STRATEGIES):
        batch = Batch(EXTENDS, PREFIXES, cp_size, strategy, **sizes)
        same = map(torch.equal, batch.all_ranks(pad_rows=cp_size % 3), whole)
        assert all(same), (cp_size, strategy)


@settings(max_examples=examples(40), deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 90)), min_size=1, max_size=4),
    cp_size=st.integers(1, 16),
    strategy=st.sampled_from(STRATEGIES),
    window=st.tuples(*[st.none() | st.integers(0, 60)] * 2),
    softcap=st.sampled_from([0.0, 5.0]),
    with_sinks=st.booleans(),
    with_mask=st.booleans(),
    causal=st.booleans(),
    page_size=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 9),
)
def test_ragged_batches(
    lens, cp_size, strategy, window, softcap, with_sinks, with_mask, causal, page_size, dtype, seed
):
    """Ranks may have weights, padding rows, and masks whose rows begin within a byte."""
    options = {"softcap": softcap, "causal": causal}
    options["window"] = window[0] if causal else window
    if with_sinks:
        options["sinks"] = SINKS
    masks, of_one, of_ranks = random_masks(seed, 0.5, lens), {}, {}
    if with_mask:
        of_one = of_ranks = {"custom_mask": dense(masks)}
        if seed % 4 < 2:
            of_ranks = {"packed_custom_mask": packed(masks)}
    extends, prefixes = zip(*lens, strict=True)
    sizes = {"head_dim": 16, "page_size": page_size, "dtype": dtype, "seed": seed}
    if seed % 2 and strategy != "interleave":
        sizes["weights"] = [1 + (seed + rank) % 4 for rank in range(cp_size)]
    alone, batch = (
        Batch(extends, prefixes, cp_size, strategy, **sizes, options=options | mask)
        for mask in (of_one, of_ranks)
    )
    whole = alone.whole()
    assert_attention(*whole, alone.inputs)
    assert all(map(torch.equal, batch.all_ranks(pad_rows=seed % 3), whole))


PAGE, KV_HEADS, DIM = 16, 2, 32
TABLES = np.array([[4, 0, 7, -1, -1], [9, *[-1] * 4], [1, 2, 3, 5, 6], [8, *[-1] * 4], [10] * 5])
SLOTS, HEADS = 11 * PAGE, 4
CODES = ("float8_e4m3fn", "float8_e5m2", "int8")


def codes(kind, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SLOTS, KV_HEADS, DIM, generator=draw)
    return (
        (x * 40).clamp(-127, 127).to(torch.int8) if kind == "int8" else x.to(getattr(torch, kind))
    )


def scales(kind, seed):
    draw = torch.Generator().manual_seed(seed)
    shape = {"heads": (KV_HEADS,), "tokens": (SLOTS, KV_HEADS)}.get(kind)
    return 0.02 if shape is None else 0.01 + torch.rand(shape, generator=draw) / 50


def coded(kind, scale, dtype=torch.bfloat16):
    q = torch.randn(sum(EXTENDS), HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"scale": 0.2, "k_scale": scales(scale, 3), "v_scale": scales(scale, 4)}
    return q, codes(kind, 1), codes(kind, 2), options


def one_process(q, k, v, **options):
    return cpattn.paged_attention(
        q, k, v, q_lens=EXTENDS, kv_lens=KV_LENS, block_tables=TABLES, page_size=PAGE,
        batch_invariant=True, return_lse=True, **options,
    )  # fmt: skip


def codes_on_ranks(q, k, v, cp_size, strategy, **options):
    options |= {"block_tables": TABLES, "page_size": PAGE, "num_kv_heads": KV_HEADS}
    return on_ranks(q, (k, v), EXTENDS, KV_LENS, cp_size, strategy, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", ["tensor", "heads", "tokens"])
@pytest.mark.parametrize("kind", CODES)
def test_codes_have_the_bits_of_one_process(kind, scale, strategy):
    q, k, v, options = coded(kind, scale)
    expected = one_process(q, k, v, **options, window=25, softcap=3.0)
    assert torch.all(torch.isfinite(expected[1]))
    for cp_size in (1, 3, 16):
        results = codes_on_ranks(q, k, v, cp_size, strategy, **options, window=25, softcap=3.0)
        assert all(map(torch.equal, results, expected)), cp_size


@pytest.mark.parametrize("kind", CODES)
def test_bytes_are_the_codes_that_kv_dtype_names(kind):
    q, k, v, options = coded(kind, "heads")
    raw = (k.view(torch.uint8), v.view(torch.uint8))
    expected = codes_on_ranks(q, k, v, 2, "zigzag", **options)
    results = codes_on_ranks(q, *raw, 2, "zigzag", **options, kv_dtype=kind)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("scale", ["tensor", "heads", "tokens"])
def test_values_in_the_keys_have_the_scale_of_keys(scale):
    q, k, _, options = coded("int8", scale)
    expected = one_process(q, k, k[..., :16], **options | {"v_scale": options["k_scale"]})
    del options["v_scale"]
    results = codes_on_ranks(q, k, None, 3, "zigzag", **options, v_head_dim=16)
    assert all(map(torch.equal, results, expected))


class Latents:
    """Keys of `nope` and `rope` dimensions, whose first `value` ones are the values."""

    def __init__(self, nope=48, rope=16, value=32, dtype="float32", heads=4):
        self.nope, self.value = nope, value
        case = Case(
            q_lens=EXTENDS, kv_lens=KV_LENS, head_dim=nope + rope, num_heads=heads, num_kv_heads=1,
            dtype=dtype,
        )  # fmt: skip
        inputs = make_inputs(case)
        self.q = inputs["q"].contiguous()
        self.cache = inputs["k_cache"].contiguous()
        self.tables, self.page_size = inputs["block_tables"], case.page_size

    def whole(self, **options):
        """Attend in one process without context parallelism, with keys and ropes in one cache."""
        inputs = {"q": self.q, "k_cache": self.cache, "v_cache": self.cache[..., : self.value]}
        inputs |= {"q_lens": EXTENDS, "kv_lens": KV_LENS, "block_tables": self.tables}
        inputs |= {"scale": 0.1, **options}
        return cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True), inputs

    def apart(self, x):
        return x[..., : self.nope].contiguous(), x[..., self.nope :].contiguous()

    def all_ranks(self, cp_size, strategy, *, rope_apart, **options):
        q, cache, sizes = self.q, self.cache, {"num_kv_heads": 1, "v_head_dim": self.value}
        sizes |= {"block_tables": self.tables, "page_size": self.page_size, "scale": 0.1}
        if rope_apart:
            (q, q_rope), (cache, k_rope) = self.apart(q), self.apart(cache)
            sizes |= {"q_rope": q_rope.flatten(1), "k_rope": k_rope}
        return on_ranks(q, (cache, None), EXTENDS, KV_LENS, cp_size, strategy, **sizes | options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rope_apart", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 9, "softcap": 2.0}, {"causal": False}])
def test_latents_have_the_bits_of_one_process(options, rope_apart, strategy):
    latents = Latents()
    expected, inputs = latents.whole(**options)
    assert_attention(*expected, inputs)
    for cp_size in CP_SIZES:
        results = latents.all_ranks(cp_size, strategy, rope_apart=rope_apart, **options)
        assert all(map(torch.equal, results, expected)), cp_size


@pytest.mark.parametrize("rope_apart", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deepseek_s_dimensions(isa, dtype, rope_apart):
    """Keys have 576 dimensions, of which 64 are rotary; values are the first 512 of one cache."""
    latents = Latents(512, 64, 512, dtype, heads=8)
    expected, _ = latents.whole()
    results = latents.all_ranks(3, "zigzag", rope_apart=rope_apart)
    assert all(map(torch.equal, results, expected))


def test_parts_have_any_number_of_dimensions(isa):
    latents = Latents(44, 20, 44)
    _, inputs = latents.whole()
    assert_attention(*latents.all_ranks(2, "zigzag", rope_apart=True), inputs)


def test_the_scale_of_both_parts_is_the_default():
    def attend(latents, scale):
        return latents.all_ranks(1, "contiguous", rope_apart=True, scale=scale)[0]

    assert torch.equal(attend(Latents(), None), attend(Latents(), 1 / math.sqrt(64)))
    with pytest.raises(ValueError, match=r"scale must be given for .* > 256, got head_dim 272"):
        attend(Latents(256), None)
