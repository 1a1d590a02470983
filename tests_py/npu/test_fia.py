# SPDX-License-Identifier: Apache-2.0
"""npu_fused_infer_attention_score agrees with the oracle in layouts, modes, lengths and masks."""

import inspect
import itertools
import math

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
from support.pairwise import pairwise

Q_LENS, KV_LENS = (5, 1, 7), (20, 17, 7)
# Blocks by head need queries with heads before tokens, or packed sequences.
FORMS = [
    (layout, blocks)
    for layout in LAYOUTS
    for blocks in (None, "H", "N")
    if blocks != "N" or layout[:3] in ("BNS", "TND", "NTD")
]


def causal(**changes):
    return {"sparse_mode": 3, "atten_mask": TEMPLATE} | changes


@pytest.mark.parametrize(("layout", "blocks"), FORMS)
def test_layouts(layout, blocks):
    dtype = DTYPES[len(layout + (blocks or "")) % 3]
    batch = FiaBatch(layout, Q_LENS, KV_LENS, blocks=blocks, v_head_dim=48, dtype=dtype)
    for lse in (True, False):
        out, lse_out = fia(**batch.arguments(**causal(softmax_lse_flag=lse)))
        batch.check((out, lse_out), mode=3, lse=lse)
        assert out.dtype == batch.torch_dtype
        assert out.is_contiguous()
        assert lse_out.dtype == torch.float32
        assert lse_out.shape[-1] == 1 if lse else lse_out.tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dims", "heads", "block_size"),
    [
        *(((16, 16), (1, 1), 1), ((80, 80), (6, 2), 5)),
        *(((192, 128), (2, 2), 128), ((128, 128), (128, 1), 512)),
    ],
)
def test_what_the_chip_could_not(isa, dims, heads, block_size, dtype):
    sizes = (*heads, *dims, 0, dtype, "N", block_size)
    batch = FiaBatch("TND", (3, 2), (19, 8), *sizes, scale=dims[0] ** -0.5)
    batch.check(fia(**batch.arguments(**causal(softmax_lse_flag=True))), mode=3)


BANDS = [(None, None), (3, 2), (0, 0), (100, 0), (-2, 8), (8, -3), (2**40, 2**40)]


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_sparse_modes(layout):
    """Modes 1 to 3 ignore the band; queries may outnumber keys."""
    for mode, (before, after) in itertools.product(range(5), BANDS):
        batch = FiaBatch(layout, (5, 1, 9), (20, 17, 7))
        arguments = batch.arguments(sparse_mode=mode, softmax_lse_flag=True, atten_mask=TEMPLATE)
        arguments |= {} if before is None else {"pre_tokens": before, "next_tokens": after}
        masks = None
        if mode in (0, 1):
            mask = np.random.default_rng(1).random((11, 22)) < 0.3
            arguments["atten_mask"], masks = torch.from_numpy(mask), [mask] * 3
        batch.check(fia(**arguments), mode, before, after, masks)


@pytest.mark.parametrize("blocks", [None, "H"])
def test_one_query_of_one_key_takes_larger_masks(blocks):
    batch = FiaBatch("BSND", (1, 1), (1, 1), spare_rows=0, blocks=blocks)
    for mask in (TEMPLATE, TEMPLATE[None], TEMPLATE[None, None]):
        batch.check(fia(**batch.arguments(atten_mask=mask, softmax_lse_flag=True)))
    with pytest.raises(ValueError, match=r"atten_mask must be .*, got shape \[1, 0, 4\]"):
        fia(**batch.arguments(atten_mask=torch.zeros(1, 0, 4, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("shape", "mask_dtype"),
    [
        *(("SS", torch.bool), ("1SS", torch.int8), ("BSS", torch.uint8)),
        *(("11SS", torch.int8), ("B1SS", torch.bool), ("rounded", torch.uint8)),
    ],
)
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


def test_masks_of_single_queries_and_template_shapes():
    """Masks may be as wide as the table of blocks; the template's contents do not matter."""
    batch = FiaBatch("BNSD", (1, 1, 1), KV_LENS, spare_rows=0, blocks="H")
    mask = np.random.default_rng(3).random((3, 1, 40)) < 0.4
    for shape in ((3, 40), (3, 1, 40), (3, 1, 1, 40)):
        given = {"sparse_mode": 0, "atten_mask": torch.from_numpy(mask).view(shape)}
        batch.check(fia(**batch.arguments(softmax_lse_flag=True, **given)), 0, masks=mask)
    batch = FiaBatch("BSND", Q_LENS, KV_LENS)
    for shape in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)):
        template = torch.zeros(shape, dtype=torch.uint8)
        given = batch.arguments(sparse_mode=2, atten_mask=template, softmax_lse_flag=True)
        batch.check(fia(**given), 2)


def test_lengths_default_to_those_of_the_tensors():
    batch = FiaBatch("BSND", (6, 6), (11, 11), spare_rows=0)
    arguments = batch.arguments(softmax_lse_flag=True)
    for lengths in (None, [6], (6, 6), [6, 6, 99], np.array([6, 6]), torch.tensor([6, 6])):
        arguments["actual_seq_lengths"] = lengths
        batch.check(fia(**arguments))
    arguments["actual_seq_lengths_kv"] = None
    batch.check(fia(**arguments))


@pytest.mark.parametrize(
    ("layout", "sizes", "dtype"),
    pairwise(["TND", "BSND"], [(512, 64, 1), (128, 64, 4)], ["bfloat16", "float32"]),
)
def test_rope_parts_apart(layout, sizes, dtype):
    dim, rope, kv_heads = sizes
    sizes = (4, kv_heads, dim, dim, rope, dtype, "H" if dim == 512 else None)
    batch = FiaBatch(layout, (3, 2), (20, 9), *sizes, scale=192**-0.5)
    batch.check(fia(**batch.arguments(**causal(softmax_lse_flag=True))), mode=3)


def test_defaults():
    """Defaults are the layout BSH, one head and the scale 1, not 1 / sqrt(D)."""
    batch = FiaBatch("BSH", (4,), (6,), num_heads=1, num_kv_heads=1, spare_rows=0, scale=1.0)
    query, key, value = (batch.arguments()[name] for name in ("query", "key", "value"))
    batch.check(fia(query, key, value, softmax_lse_flag=True))


@pytest.mark.parametrize("inner_precise", [0, 1, 2, 3])
def test_rows_without_keys_are_zeros_under_any_precision(inner_precise):
    batch = FiaBatch("BSND", (9,), (4,), spare_rows=0)
    out, lse = fia(**batch.arguments(**causal(inner_precise=inner_precise, softmax_lse_flag=True)))
    batch.check((out, lse), mode=3)
    assert torch.all(out[0, :5] == 0)
    assert torch.all(lse[0, :, :5] == -math.inf)


def test_empty_tensors():
    q, empty = torch.randn(2, 3, 64), torch.zeros(2, 0, 64)
    out, lse = fia(q, empty, empty, num_heads=2, softmax_lse_flag=True)
    assert torch.equal(out, torch.zeros(2, 3, 64))
    assert torch.all(lse == -math.inf)
    for layout, shape, kv_shape in (
        ("TND", (0, 4, 32), (7, 4, 32)),
        ("BSND", (2, 0, 4, 32), (2, 7, 4, 32)),
    ):
        key, options = torch.zeros(kv_shape), {"num_heads": 4, "input_layout": layout}
        out, lse = fia(torch.zeros(shape), key, key, softmax_lse_flag=True, **options)
        assert out.shape == shape
        assert lse.numel() == 0


def test_strided_inputs():
    """Views need no copy: a [B, S, N, D] buffer viewed as BNSD, and a part of a row."""
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
    """Some sequences have no keys or queries; the band is ignored without a mask."""
    layout, blocks = data.draw(st.sampled_from(FORMS))
    lens = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=4)
    q_lens, kv_lens = zip(*data.draw(lens), strict=True)
    kv_heads = data.draw(st.sampled_from([1, 2]))
    mode = data.draw(st.sampled_from([0, 3] if "T" in layout else [0, 2, 3, 4]))
    before, after = data.draw(st.sampled_from(BANDS[1:]))
    choices = {"dtype": DTYPES, "block_size": [1, 16, 64], "spare_rows": [0, 1, 2]}
    options = {name: data.draw(st.sampled_from(values)) for name, values in choices.items()}
    heads = kv_heads * data.draw(st.sampled_from([1, 3])), kv_heads
    batch = FiaBatch(layout, q_lens, kv_lens, *heads, blocks=blocks, **options)
    mask = {"sparse_mode": mode, "atten_mask": TEMPLATE if mode else None}
    band = {"pre_tokens": before, "next_tokens": after}
    batch.check(fia(**batch.arguments(softmax_lse_flag=True, **mask, **band)), mode, before, after)


def test_the_signature_is_torch_npu_s():
    parameters = inspect.signature(fia).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["query", "key", "value"]
    defaults = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    numbers = {"pre_tokens": 2147483647, "next_tokens": 2147483647, "num_heads": 1, "scale": 1.0}
    zeros = "num_key_value_heads sparse_mode inner_precise block_size antiquant_mode"
    expected = numbers | {"input_layout": "BSH", "softmax_lse_flag": False}
    expected |= dict.fromkeys([*zeros.split(), "key_antiquant_mode", "value_antiquant_mode"], 0)
    assert {n: d for n, d in defaults.items() if d is not None} == expected
    assert len(defaults) == 37
