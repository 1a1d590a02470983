# SPDX-License-Identifier: Apache-2.0
"""Caches of 8-bit codes over ranks have the bits of one process, with every kind of scale."""

import numpy as np
import pytest
import torch

import cpattn
from support.cp_batches import STRATEGIES, on_ranks

EXTENDS, PREFIXES, PAGE, KV_HEADS, DIM = (13, 1, 40, 0), (20, 3, 33, 9), 16, 2, 32
LENGTHS = [new + cached for new, cached in zip(EXTENDS, PREFIXES, strict=True)]
TABLES = np.array([[4, 0, 7, -1, -1], [9, *[-1] * 4], [1, 2, 3, 5, 6], [8, *[-1] * 4]])
SLOTS, HEADS = 10 * PAGE, 4
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


def inputs(kind, scale, dtype=torch.bfloat16):
    q = torch.randn(sum(EXTENDS), HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    options = {"scale": 0.2, "k_scale": scales(scale, 3), "v_scale": scales(scale, 4)}
    return q, codes(kind, 1), codes(kind, 2), options


def one_process(q, k, v, **options):
    return cpattn.paged_attention(
        q, k, v, q_lens=EXTENDS, kv_lens=LENGTHS, block_tables=TABLES, page_size=PAGE,
        batch_invariant=True, return_lse=True, **options,
    )  # fmt: skip


def all_ranks(q, k, v, cp_size, strategy, **options):
    options |= {"block_tables": TABLES, "page_size": PAGE, "num_kv_heads": KV_HEADS}
    return on_ranks(q, (k, v), EXTENDS, LENGTHS, cp_size, strategy, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scale", ["tensor", "heads", "tokens"])
@pytest.mark.parametrize("kind", CODES)
def test_every_number_of_ranks_gives_the_bits_of_one_process(kind, scale, strategy):
    q, k, v, options = inputs(kind, scale)
    expected = one_process(q, k, v, **options, window=25, softcap=3.0)
    assert torch.all(torch.isfinite(expected[1]))
    for cp_size in (1, 3, 16):
        results = all_ranks(q, k, v, cp_size, strategy, **options, window=25, softcap=3.0)
        assert all(map(torch.equal, results, expected)), cp_size


@pytest.mark.parametrize("kind", CODES)
def test_bytes_are_the_codes_that_kv_dtype_names(kind):
    q, k, v, options = inputs(kind, "heads")
    raw = (k.view(torch.uint8), v.view(torch.uint8))
    expected = all_ranks(q, k, v, 2, "zigzag", **options)
    results = all_ranks(q, *raw, 2, "zigzag", **options, kv_dtype=kind)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("scale", ["tensor", "heads", "tokens"])
def test_values_in_the_keys_have_the_scale_of_keys(scale):
    q, k, _, options = inputs("int8", scale)
    expected = one_process(q, k, k[..., :16], **options | {"v_scale": options["k_scale"]})
    del options["v_scale"]
    results = all_ranks(q, k, None, 3, "zigzag", **options, v_head_dim=16)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype must be 'float8_e4m3fn', 'float8_e5m2' or 'int8'"),
        ({"kv_dtype": "float8_e5m2"}, "k_cache must be .*as kv_dtype says, or its bytes"),
        ({"k_scale": torch.ones(3)}, "k_scale must"),
        ({"v_scale": -1.0}, "v_scale must"),
        ({"v": None, "v_head_dim": 16}, "v_scale must not be given without v_cache"),
    ],
)
def test_value_errors(change, message):
    q, k, v, options = inputs("int8", "tensor")
    options |= change
    with pytest.raises(ValueError, match=f"do_cp_attn_fia: {message}"):
        all_ranks(q, k, options.pop("v", v), 2, "zigzag", **options)
