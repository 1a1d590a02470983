# SPDX-License-Identifier: Apache-2.0
"""Windows, softcap, sinks and masks have the bits of one process over any number of ranks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import (
    DTYPES,
    assert_attention,
    dense,
    numbers,
    packed,
    random_bias,
)
from support.cp_batches import STRATEGIES, Batch
from support.examples import examples

EXTENDS, PREFIXES = (13, 1, 40, 0, 5), (20, 3, 33, 9, 0)
LENS = list(zip(EXTENDS, PREFIXES, strict=True))
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
    "bias": {"bias": random_bias(EXTENDS, [sum(x) for x in LENS], 4)},
    "bias of all": {"bias": numbers(1, 4, 40, 73), "causal": False},
    "ALiBi": {"alibi_slopes": numbers(5, 4)},
    "relative bias": {"relative_bias": numbers(4, 41), "causal": False, "window": (40, 9)},
    "everything hidden": {"custom_mask": dense(random_masks(shown=0)), "causal": False},
    "all": {
        "window": 11,
        "softcap": 4.0,
        "sinks": SINKS,
        "custom_mask": dense(random_masks(3, 0.8)),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_number_of_ranks_gives_the_bits_of_one_process(name):
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


def rank_zero(batch):
    return batch.metadata[0], batch.metadata[0].shard(batch.inputs["q"].flatten(1).contiguous())


SIZE = sum(new * (new + cached) for new, cached in LENS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, r"window must be >= 0 \(0: a token sees itself\), got -1"),
        ({"softcap": -1.0}, "softcap must be .*, got -1"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\], got \[3\]"),
        (
            {"custom_mask": np.ones(SIZE - 1, bool)},
            rf"custom_mask must have sum\(q_len \* kv_len\) = {SIZE} elements, got {SIZE - 1}",
        ),
        (
            {"packed_custom_mask": np.ones(9, np.uint8), "custom_mask": np.ones(SIZE, bool)},
            "give either .* got both",
        ),
        ({"q_rope": torch.zeros(0, 64)}, "q_rope and k_rope must be given together"),
        ({"k_rope": torch.zeros(0, 64)}, "q_rope and k_rope must be given together"),
        ({"v_head_dim": 16}, "v_head_dim must not .*v_cache, which has it in its size, got 16"),
    ],
)
def test_value_errors(change, message):
    batch = Batch(EXTENDS, PREFIXES, 2, "zigzag")
    metadata, q = rank_zero(batch)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(ValueError, match=message) as error:
        batch.run(metadata, q, out=out, **change)
    assert str(error.value).startswith("do_cp_attn_fia: ")
    assert torch.all(torch.isnan(out))
