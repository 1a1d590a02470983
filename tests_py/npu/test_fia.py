# SPDX-License-Identifier: Apache-2.0
"""npu_fused_infer_attention_score: layouts, modes, lengths and masks against the oracle."""

from __future__ import annotations

import inspect
import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.npu import npu_fused_infer_attention_score as fia
from support.cases import DTYPES
from support.examples import examples
from support.npu.fia_cases import LAYOUTS, TEMPLATE, FiaBatch
from support.tolerances import assert_close, to_float64

Q_LENS, KV_LENS = (5, 1, 7), (20, 17, 7)
PACKED = [layout for layout in LAYOUTS if "T" in layout]
# Blocks by head need a query with the heads before the tokens, or packed sequences.
FORMS = [
    (layout, blocks)
    for layout in LAYOUTS
    for blocks in (None, "H", "N")
    if blocks != "N" or layout[:3] in ("BNS", "TND", "NTD")
]


def causal(**changes):
    return {"sparse_mode": 3, "atten_mask": TEMPLATE} | changes


@pytest.mark.parametrize(("layout", "blocks"), FORMS)
@pytest.mark.parametrize("lse", [True, False])
def test_layouts(layout, blocks, lse):
    dtype = DTYPES[len(layout + (blocks or "")) % 3]
    batch = FiaBatch(layout, Q_LENS, KV_LENS, blocks=blocks, v_head_dim=48, dtype=dtype)
    result = fia(**batch.arguments(**causal(softmax_lse_flag=lse)))
    batch.check(result, mode=3, lse=lse)
    out, lse_out = result
    assert out.dtype == batch.torch_dtype
    assert out.is_contiguous()
    assert lse_out.dtype == torch.float32
    if not lse:
        assert lse_out.tolist() == [0]


def test_shapes_of_results():
    batch, rows, heads, dim = 3, 9, 4, 48  # 7 tokens and 2 spare rows
    shapes = {
        "BSH": (batch, rows, heads * dim),
        "BSND": (batch, rows, heads, dim),
        "BNSD": (batch, heads, rows, dim),
        "NBSD": (heads, batch, rows, dim),
        "TND": (13, heads, dim),
        "NTD": (heads, 13, dim),
    }
    for layout in LAYOUTS:
        arguments = FiaBatch(layout, Q_LENS, KV_LENS, v_head_dim=48).arguments()
        out, lse = fia(**arguments, softmax_lse_flag=True)
        assert tuple(out.shape) == shapes[layout.split("_")[-1]]
        expected = (13, heads, 1) if "T" in layout else (batch, heads, rows, 1)
        assert tuple(lse.shape) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_of_each_sequence(layout):
    """Decoding: one plan even with the heads outside the tokens."""
    batch = FiaBatch(layout, (1, 1, 1), (20, 1, 33), spare_rows=0, blocks="H")
    batch.check(fia(**batch.arguments(softmax_lse_flag=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "heads", "kv_heads", "block_size"),
    [(16, 16, 1, 1, 1), (80, 80, 6, 2, 5), (192, 128, 2, 2, 128), (128, 128, 128, 1, 512)],
)
def test_what_the_chip_could_not(isa, head_dim, v_head_dim, heads, kv_heads, block_size, dtype):
    batch = FiaBatch(
        "TND",
        (3, 2),
        (19, 8),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        blocks="N",
        block_size=block_size,
        scale=head_dim**-0.5,
    )
    batch.check(fia(**batch.arguments(**causal(softmax_lse_flag=True))), mode=3)


BANDS = [(None, None), (3, 2), (0, 0), (100, 0), (-2, 8), (8, -3), (2**40, 2**40)]


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("before", "after"), BANDS)
def test_sparse_modes(mode, before, after, layout):
    """Modes 1 to 3 ignore the band; queries may outnumber keys."""
    batch = FiaBatch(layout, (5, 1, 9), (20, 17, 7))
    arguments = batch.arguments(sparse_mode=mode, softmax_lse_flag=True)
    arguments |= {} if before is None else {"pre_tokens": before, "next_tokens": after}
    masks = None
    if mode in (0, 1):
        mask = np.random.default_rng(1).random((11, 22)) < 0.3
        arguments["atten_mask"], masks = torch.from_numpy(mask), [mask] * 3
    else:
        arguments["atten_mask"] = TEMPLATE
    batch.check(fia(**arguments), mode, before, after, masks)


@pytest.mark.parametrize("blocks", [None, "H"])
def test_one_query_of_one_key_takes_larger_masks(blocks):
    batch = FiaBatch("BSND", (1, 1), (1, 1), spare_rows=0, blocks=blocks)
    for mask in (TEMPLATE, TEMPLATE[None], TEMPLATE[None, None]):
        batch.check(fia(**batch.arguments(atten_mask=mask, softmax_lse_flag=True)))
    with pytest.raises(ValueError, match=r"atten_mask must be .*, got shape \[1, 0, 4\]"):
        fia(**batch.arguments(atten_mask=torch.zeros(1, 0, 4, dtype=torch.bool)))


def test_without_a_mask_the_band_is_ignored():
    batch = FiaBatch("BSND", Q_LENS, KV_LENS)
    batch.check(fia(**batch.arguments(pre_tokens=1, next_tokens=0, softmax_lse_flag=True)))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", ["SS", "1SS", "BSS", "11SS", "B1SS", "rounded"])
def test_mask_shapes(shape, mask_dtype):
    batch = FiaBatch("BNSD", Q_LENS, KV_LENS)
    masks = np.random.default_rng(2).random((3, 9, 22)) < 0.4
    if "B" not in shape:
        masks[:] = masks[0]
    mask = torch.from_numpy(masks).to(mask_dtype)
    if shape == "rounded":
        mask = F.pad(mask[0], (0, 32 - 22, 0, 16 - 9))
    elif "B" not in shape:
        mask = mask[0].reshape((1,) * (len(shape) - 2) + (9, 22))
    elif len(shape) == 4:
        mask = mask[:, None]
    result = fia(**batch.arguments(sparse_mode=1, atten_mask=mask, softmax_lse_flag=True))
    batch.check(result, 1, masks=masks)


@pytest.mark.parametrize("shape", [(3, 40), (3, 1, 40), (3, 1, 1, 40)])
def test_masks_of_single_queries_behind_blocks(shape):
    """With blocks a mask may be as wide as the table."""
    batch = FiaBatch("BNSD", (1, 1, 1), KV_LENS, spare_rows=0, blocks="H")
    mask = np.random.default_rng(3).random((3, 1, 40)) < 0.4
    result = fia(
        **batch.arguments(
            sparse_mode=0, atten_mask=torch.from_numpy(mask).view(shape), softmax_lse_flag=True
        )
    )
    batch.check(result, 0, masks=mask)


@pytest.mark.parametrize("shape", [(2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)])
def test_template_shapes(shape):
    """What the template holds does not matter."""
    batch = FiaBatch("BSND", Q_LENS, KV_LENS)
    template = torch.zeros(shape, dtype=torch.uint8)
    result = fia(**batch.arguments(sparse_mode=2, atten_mask=template, softmax_lse_flag=True))
    batch.check(result, 2)


def test_lengths_default_to_those_of_the_tensors():
    batch = FiaBatch("BSND", (6, 6), (11, 11), spare_rows=0)
    arguments = batch.arguments(softmax_lse_flag=True)
    for lengths in (None, [6], (6, 6), [6, 6, 99], np.array([6, 6]), torch.tensor([6, 6])):
        arguments["actual_seq_lengths"] = lengths
        batch.check(fia(**arguments))
    arguments["actual_seq_lengths_kv"] = None
    batch.check(fia(**arguments))


@pytest.mark.parametrize("layout", ["TND", "BSND"])
@pytest.mark.parametrize(("dim", "rope", "kv_heads"), [(512, 64, 1), (128, 64, 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rope_parts_apart(layout, dim, rope, kv_heads, dtype):
    batch = FiaBatch(
        layout,
        (3, 2),
        (20, 9),
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        rope_dim=rope,
        blocks="H" if dim == 512 else None,
        scale=192**-0.5,
        dtype=dtype,
    )
    batch.check(fia(**batch.arguments(**causal(softmax_lse_flag=True))), mode=3)


def test_against_torch():
    """Independently of the oracle: torch's attention in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 64, generator=generator) for n, s in [(4, 5), (2, 9), (2, 9)])
    for mode, visible in [
        (0, torch.ones(5, 9).bool()),
        (2, torch.ones(5, 9).tril().bool()),
        (3, torch.ones(5, 9).tril(4).bool()),
        (4, torch.ones(5, 9).tril(5).triu(2).bool()),
    ]:
        out, _ = fia(
            q,
            k,
            v,
            num_heads=4,
            num_key_value_heads=2,
            input_layout="BNSD",
            scale=0.125,
            sparse_mode=mode,
            atten_mask=TEMPLATE if mode else None,
            pre_tokens=2,
            next_tokens=1,
        )
        expected, magnitude = (
            F.scaled_dot_product_attention(
                q.double(), k.double(), values.double(), attn_mask=visible, enable_gqa=True
            )
            for values in (v, v.abs())
        )
        assert_close(out, to_float64(expected), to_float64(magnitude), "attention", "float32")


def test_defaults():
    """BSH, one head, scale 1: not 1 / sqrt(D)."""
    batch = FiaBatch("BSH", (4,), (6,), num_heads=1, num_kv_heads=1, spare_rows=0, scale=1.0)
    query, key, value = (batch.arguments()[name] for name in ("query", "key", "value"))
    batch.check(fia(query, key, value, softmax_lse_flag=True))


def test_the_two_calls_of_context_parallel_attention():
    """The halves of upstream's unit test: 2 and 1 rows of 4, 16 and 8 heads, blocks of 128."""
    for q_len, kv_len in [(2, 2), (1, 3)]:
        batch = FiaBatch(
            "TND",
            (q_len,),
            (kv_len,),
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            v_head_dim=128,
            blocks="H",
            block_size=128,
            scale=0.08838834764831845,
            dtype="bfloat16",
        )
        out, lse = fia(**batch.arguments(**causal(next_tokens=0)))
        batch.check((out, lse), mode=3, lse=False)
        assert out.flatten(1).shape == (q_len, 2048)


@pytest.mark.parametrize("inner_precise", [0, 1, 2, 3])
def test_rows_without_keys_are_zeros_under_any_precision(inner_precise):
    batch = FiaBatch("BSND", (9,), (4,), spare_rows=0)
    out, lse = fia(**batch.arguments(**causal(inner_precise=inner_precise, softmax_lse_flag=True)))
    batch.check((out, lse), mode=3)
    assert torch.all(out[0, :5] == 0)
    assert torch.all(lse[0, :, :5] == -math.inf)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_sequences(layout):
    batch = FiaBatch(layout, (3, 0, 2), (0, 5, 4))
    batch.check(fia(**batch.arguments(softmax_lse_flag=True)))


def test_empty_key_and_value():
    q, empty = torch.randn(2, 3, 64), torch.zeros(2, 0, 64)
    out, lse = fia(q, empty, empty, num_heads=2, softmax_lse_flag=True)
    assert torch.equal(out, torch.zeros(2, 3, 64))
    assert torch.all(lse == -math.inf)


@pytest.mark.parametrize(("layout", "shape"), [("TND", (0, 4, 32)), ("BSND", (2, 0, 4, 32))])
def test_an_empty_query_returns_at_once(layout, shape):
    key = torch.zeros((7, 4, 32) if layout == "TND" else (2, 7, 4, 32))
    query = torch.zeros(shape)
    out, lse = fia(query, key, key, num_heads=4, input_layout=layout, softmax_lse_flag=True)
    assert out.shape == shape
    assert lse.numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_in_numpy_out(dtype):
    arguments = FiaBatch("TND", Q_LENS, KV_LENS, blocks="H", dtype=dtype).arguments(**causal())
    expected = fia(**arguments)[0].float().numpy()
    type_ = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].float().numpy().astype(type_)
    arguments["atten_mask"] = TEMPLATE.numpy()
    out, lse = fia(**arguments)
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)
    assert out.dtype == type_
    np.testing.assert_array_equal(out.astype(np.float32), expected)


def test_strided_inputs():
    """Views are taken as they are: a [B, S, N, D] buffer seen as BNSD, and a part of a row."""
    batch = FiaBatch("BNSD", (5, 3), (20, 17))
    arguments = batch.arguments(softmax_lse_flag=True)
    for name in ("query", "key", "value"):
        whole = torch.full((2, arguments[name].shape[2], 6, 40), torch.nan)
        view = whole[:, :, 1 : 1 + arguments[name].shape[1], 4:36].transpose(1, 2)
        arguments[name] = view.copy_(arguments[name])
    batch.check(fia(**arguments))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_ragged_batches(data):
    layout, blocks = data.draw(st.sampled_from(FORMS))
    lens = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=4)
    q_lens, kv_lens = zip(*data.draw(lens), strict=True)
    kv_heads = data.draw(st.sampled_from([1, 2]))
    mode = data.draw(st.sampled_from([0, 3] if "T" in layout else [0, 2, 3, 4]))
    before, after = data.draw(st.sampled_from(BANDS[1:]))
    batch = FiaBatch(
        layout,
        q_lens,
        kv_lens,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * data.draw(st.sampled_from([1, 3])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        blocks=blocks,
        block_size=data.draw(st.sampled_from([1, 16, 64])),
        spare_rows=data.draw(st.integers(0, 2)),
    )
    arguments = batch.arguments(
        sparse_mode=mode,
        atten_mask=TEMPLATE if mode else None,
        pre_tokens=before,
        next_tokens=after,
        softmax_lse_flag=True,
    )
    batch.check(fia(**arguments), mode, before, after)


def test_the_signature_is_torch_npu_s():
    parameters = inspect.signature(fia).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["query", "key", "value"]
    defaults = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert {n: d for n, d in defaults.items() if d is not None} == {
        "num_heads": 1,
        "scale": 1.0,
        "pre_tokens": 2147483647,
        "next_tokens": 2147483647,
        "input_layout": "BSH",
        "num_key_value_heads": 0,
        "sparse_mode": 0,
        "inner_precise": 0,
        "block_size": 0,
        "antiquant_mode": 0,
        "softmax_lse_flag": False,
        "key_antiquant_mode": 0,
        "value_antiquant_mode": 0,
    }
    assert len(defaults) == 37
