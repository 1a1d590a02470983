# SPDX-License-Identifier: Apache-2.0
"""Attention of a rank takes padding rows and views as caches, and names refused arguments."""

import numpy as np
import pytest
import torch

import cpattn
from support.cp_batches import STRATEGIES, Batch


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_physical_padding(strategy):
    batch = Batch((9, 5), (4, 0), 4, strategy)
    for metadata in batch.metadata:
        padded = metadata.pad_to_physical()
        q = padded.shard(batch.inputs["q"].flatten(1).contiguous())
        out = batch.run(padded, q)
        rows = len(metadata.local_q_indices)
        assert len(out) == len(q) == padded.per_rank_actual_token[0]
        assert torch.equal(out[:rows], batch.run(metadata, q[:rows]))
        assert torch.all(out[rows:] == 0)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_an_out_over_what_is_read_is_refused_untouched(name):
    batch = Batch((10,), (5,), 1, "zigzag")
    caches = batch.flat_caches()
    batch.flat_caches = lambda: caches
    q = batch.inputs["q"].flatten(1).contiguous()
    shared = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}[name]
    before = shared.clone()
    out = shared.flatten()[: q.numel()].view(q.shape)
    with pytest.raises(ValueError, match=f"do_cp_attn_fia: out must not overlap {name} in memory"):
        batch.run(batch.metadata[0], q, out=out)
    assert torch.equal(shared.nan_to_num(), before.nan_to_num())


def rank_zero(batch):
    return batch.metadata[0], batch.metadata[0].shard(batch.inputs["q"].flatten(1).contiguous())


NEW, OLD = (10, 14), (5, 12)
BITS = 10 * 15 + 14 * 26
# Five pages of 16 tokens have rotary parts of 16 dimensions.
ROPES = {"q_rope": torch.zeros(24, 4 * 16), "k_rope": torch.zeros(5, 16, 2 * 16)}
TOGETHER = "q_rope and k_rope must be given together"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, r"page_size must be in \[1, 2147483647\], got 0"),
        ({"page_size": 7}, "k_cache must hold a multiple of page_size"),
        ({"num_heads": 3}, r"q must have a multiple of num_heads \(3\) columns, got 256"),
        ({"num_heads": 0}, r"num_heads must be in \[1, 65536\], got 0"),
        ({"num_kv_heads": 0}, r"num_kv_heads must be in \[1, 65536\], got 0"),
        ({"q": torch.zeros(23, 256)}, "q must have"),
        ({"block_tables": [[0]]}, r"block_tables must have one row per sequence \(2\), got 1"),
        ({"block_tables": [[0], [1]]}, r"block_tables must have .*for sequence 1 \(kv_len 26"),
        ({"block_tables": [[0, 1], [2, 99]]}, r"page ids must be in .*, got 99 at position 1"),
        ({"window": -1}, r"window must be >= 0 \(0: a token sees itself\), got -1"),
        ({"softcap": -1.0}, "softcap must be .*, got -1"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\], got \[3\]"),
        (
            {"custom_mask": np.ones(BITS - 1, bool)},
            rf"custom_mask must have sum\(q_len \* kv_len\) = {BITS} elements, got {BITS - 1}",
        ),
        (
            {"packed_custom_mask": np.ones(9, np.uint8), "custom_mask": np.ones(BITS, bool)},
            "give either .* got both",
        ),
        ({"v_head_dim": 16}, "v_head_dim must not .*v_cache, which has it in its size, got 16"),
        ({"v_cache": None, "v_head_dim": 0}, r"v_head_dim must be in \[1, 576\], got 0"),
        ({"q_rope": ROPES["q_rope"]}, TOGETHER),
        ({"k_rope": ROPES["k_rope"]}, TOGETHER),
        (ROPES | {"q_rope": torch.zeros(24, 66)}, r"q_rope must have .*of num_heads \(4\) columns"),
        (
            ROPES | {"q_rope": torch.zeros(24, 0)},
            r"the dimension of q_rope must be in \[1, 576\], got 0",
        ),
        (ROPES | {"q_rope": torch.zeros(23, 64)}, r"q_rope must have shape \[24, 4, 16\]"),
        (ROPES | {"k_rope": torch.zeros(5)}, "k_rope must hold a multiple of num_pages"),
        ({"kv_dtype": "int4"}, "kv_dtype must be 'float8_e4m3fn', 'float8_e5m2' or 'int8'"),
        ({"kv_dtype": "float8_e5m2"}, "k_cache must be .*as kv_dtype says, or its bytes"),
        ({"k_scale": torch.ones(3)}, "k_scale must"),
        ({"v_scale": -1.0}, "v_scale must"),
        (
            {"v_cache": None, "v_head_dim": 16, "v_scale": 2.0},
            "v_scale must not be given without v_cache",
        ),
    ],
)
def test_value_errors(change, message):
    batch = Batch(NEW, OLD, 1, "zigzag")
    metadata, q = rank_zero(batch)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(ValueError, match=f"^do_cp_attn_fia: {message}"):
        batch.run(metadata, **{"q": q, "out": out} | change)
    assert torch.all(torch.isnan(out))


@pytest.mark.parametrize("paged", [False, True])
def test_caches_may_be_heads_of_larger_ones(paged):
    batch = Batch((10, 14), (5, 0), 2, "zigzag")
    expected = batch.run(*rank_zero(batch))
    wider = [
        torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], 1)
        for x in batch.flat_caches()
    ]
    heads = wider[0].shape[1] // 3
    views = [x[:, heads : 2 * heads] for x in wider]
    if paged:
        views = [x.unflatten(0, (-1, batch.case.page_size)) for x in views]
    batch.flat_caches = lambda: views
    assert torch.equal(batch.run(*rank_zero(batch)), expected)


def test_caches_of_joined_heads_with_gaps_are_refused():
    batch = Batch((10,), (5,), 2, "zigzag")
    k, v = batch.flat_caches()
    joined = torch.cat([k, k], 1).flatten(1)[:, : k[0].numel()]
    batch.flat_caches = lambda: [joined, v]
    with pytest.raises(ValueError, match="do_cp_attn_fia: k_cache must be contiguous"):
        batch.run(*rank_zero(batch))


@pytest.mark.parametrize("strategy", ["zigzag", "contiguous"])
def test_bare_metadata_cannot_carry_a_prefix(strategy):
    batch = Batch((10, 14), (0, 6), 2, strategy)
    bare = cpattn.build_cp_metadata(
        [10, 14], [10, 20], cp_rank=0, cp_size=2, strategy=strategy, kv_len_convention="bare"
    )
    _, q = rank_zero(batch)
    with pytest.raises(ValueError, match=r"bare .* prefix, got prefix 6 of sequence 1"):
        batch.run(bare, q)


def test_bare_metadata_without_a_prefix_is_fine():
    batch = Batch((10, 14), (0, 0), 2, "zigzag")
    bare = cpattn.build_cp_metadata([10, 14], cp_rank=0, cp_size=2, kv_len_convention="bare")
    metadata, q = rank_zero(batch)
    assert torch.equal(batch.run(bare, q), batch.run(metadata, q))


@pytest.mark.parametrize("axes", [(4, 2, 6), (2, 6), ()], ids=str)
def test_a_batch_without_keys_needs_no_pages(axes):
    nothing = cpattn.build_cp_metadata([0], [0], cp_rank=0, cp_size=2)
    out = cpattn.do_cp_attn_fia(
        torch.ones(3, 4 * 8), torch.empty(0, 4, 2, 8), torch.empty(0, *axes), nothing,
        block_tables=[[0]], page_size=4, num_heads=4, num_kv_heads=2,
    )  # fmt: skip
    assert not out.any()
    assert out.shape == (3, 4 * (6 if axes else 8))
