# SPDX-License-Identifier: Apache-2.0
"""npu_fused_infer_attention_score agrees with the oracle in every mode of int8 keys and values."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import ones, zeros

import cpattn
from cpattn.npu import npu_fused_infer_attention_score as fia
from support.cases import DTYPES
from support.npu.fia_cases import LAYOUTS, TEMPLATE, FiaBatch

Q_LENS, KV_LENS = (5, 1, 7), (20, 17, 7)
ROW_LAYOUTS = [layout for layout in LAYOUTS if "T" not in layout]
KINDS = ("one", "NxD", "N1D", "H", "token", "head", "token of head", "slot", "slot of head")
MODES = {"one": 0, "NxD": 0, "N1D": 0, "H": 0, "token": 1, "head": 2, "token of head": 3}
MODES |= {"slot": 4, "slot of head": 5}


class Int8Batch:
    """A batch with codes as keys and values, and the same batch with their numbers."""

    def __init__(self, layout: str = "BSND", dtype: str = "float32", **changes: Any) -> None:
        self.meant = FiaBatch(layout, Q_LENS, KV_LENS, dtype=dtype, **changes)
        self.codes = copy.copy(self.meant)
        self.rng = np.random.default_rng(1)
        for name in ("keys", "values"):
            codes = [
                torch.from_numpy(self.rng.integers(-128, 128, x.shape).astype(np.float32))
                for x in getattr(self.meant, name)
            ]
            setattr(self.codes, name, [x.to(self.meant.torch_dtype) for x in codes])

    def numbers(self, kind: str, dim: int, low: float, high: float) -> torch.Tensor:
        """Return scales or offsets in a shape for the mode of `kind`."""
        batch, heads, dtype = self.meant, self.meant.num_kv_heads, self.meant.torch_dtype
        tokens = max(batch.kv_lens) + batch.spare_rows + 3
        blocks = int((batch.tables >= 0).sum()) + 1
        shapes = {"one": (1,), "NxD": (heads, dim), "N1D": (1, heads, 1, dim), "H": (heads * dim,)}
        shapes |= {"token": (3, tokens), "head": (heads,), "token of head": (3, heads, tokens)}
        shapes |= {"slot": (blocks, batch.block_size)}
        shapes |= {"slot of head": (blocks, heads, batch.block_size)}
        shape, dtype = shapes[kind], dtype if MODES[kind] in (0, 2) else torch.float32
        return torch.from_numpy(self.rng.uniform(low, high, shape)).to(dtype)

    def of_sequence(self, numbers: torch.Tensor, kind: str, b: int, dim: int) -> torch.Tensor:
        """Return the numbers of a sequence, which broadcast to [tokens, N, D]."""
        batch, heads = self.meant, self.meant.num_kv_heads
        token = np.arange(batch.kv_lens[b])
        block, slot = batch.tables[b, token // batch.block_size], token % batch.block_size
        numbers = numbers.float()
        if kind in ("one", "head"):
            return numbers.view(1, -1, 1)
        if MODES[kind] == 0:
            return numbers.view(1, heads, dim)
        if kind == "token":
            return numbers[b, token][:, None, None]
        if kind == "token of head":
            return numbers[b][:, token].T[..., None]
        if kind == "slot":
            return numbers[block, slot][:, None, None]
        return numbers[block, :, slot][..., None]

    def quantize(self, key_kind: str, value_kind: str, offsets: bool) -> dict[str, Any]:
        """Return arguments of antiquant; numbers of codes are rounded to the query's dtype if the
        operator writes them out in it."""
        in_place = {"one", "head", "slot", "slot of head"}
        in_place |= set() if self.meant.blocks else {"token", "token of head"}
        expands = offsets or not {key_kind, value_kind} <= in_place
        self.rounds_values = not expands and value_kind not in ("one", "head")
        kinds = {"key": key_kind, "value": value_kind}
        arguments = {f"{name}_antiquant_mode": MODES[kind] for name, kind in kinds.items()}
        for name, kind in kinds.items():
            sequences = getattr(self.codes, f"{name}s")
            dim = sequences[0].shape[-1]
            scale = self.numbers(kind, dim, 0.005, 0.02)
            offset = self.numbers(kind, dim, -40, 90) if offsets else None
            arguments[f"{name}_antiquant_scale"] = scale
            arguments[f"{name}_antiquant_offset"] = offset
            meant = []
            for b, codes in enumerate(sequences):
                x = codes.float()
                if offset is not None:
                    x = x + self.of_sequence(offset, kind, b, dim)
                x = x * self.of_sequence(scale, kind, b, dim)
                meant.append(x.to(self.meant.torch_dtype) if expands else x)
            setattr(self.meant, f"{name}s", meant)
        return arguments

    def arguments(self, **changes: Any) -> dict[str, Any]:
        arguments = self.codes.arguments(softmax_lse_flag=True)
        for name in ("key", "value"):  # rows that must not be read have the lowest code
            arguments[name] = arguments[name].float().nan_to_num(-128).to(torch.int8)
        return arguments | changes

    def check(self, result: Any, mode: int = 0) -> None:
        self.meant.check(result, mode, rounds_values=self.rounds_values)


def kinds_of(blocks):
    return [kind for kind in KINDS if blocks or not kind.startswith("slot")]


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("blocks", [None, "H", "N"])
def test_modes(isa, blocks, offsets):
    """Keys may be scaled by heads and dimensions, and values by tokens."""
    layouts = [layout for layout in ROW_LAYOUTS if blocks != "N" or layout.startswith("BNS")]
    kinds = [*((kind, kind) for kind in kinds_of(blocks)), ("NxD", "token")]
    mask = {"sparse_mode": 3, "atten_mask": TEMPLATE}
    for i, both in enumerate(kinds):
        for dtype in DTYPES if isa == cpattn.active_isa() else [DTYPES[i % 3]]:
            batch = Int8Batch(layouts[i % len(layouts)], dtype, blocks=blocks, v_head_dim=48)
            given = batch.quantize(*both, offsets)
            batch.check(fia(**batch.arguments(**given)))
            batch.check(fia(**batch.arguments(**given, **mask)), mode=3)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(
    ("kind", "axes"), [("one", 0), ("NxD", 2), ("N1D", 3), ("H", 1), ("token", 2)]
)
def test_one_tensor_for_keys_and_values(kind, axes, offsets):
    """A separate tensor for keys or values takes precedence."""
    batch = Int8Batch(dtype="bfloat16")
    given = batch.quantize(kind, kind, offsets)
    both = {"antiquant_mode": MODES[kind]}
    for name in ("scale", "offset") if offsets else ("scale",):
        pair = [given[f"{side}_antiquant_{name}"] for side in ("key", "value")]
        both[f"antiquant_{name}"] = torch.stack([x.reshape(x.shape[x.ndim - axes :]) for x in pair])
    expected = fia(**batch.arguments(**given))
    results = [fia(**batch.arguments(**both))]
    both["antiquant_scale"] = both["antiquant_scale"] * 2
    results.append(fia(**batch.arguments(**both | given)))
    for result in results:
        assert all(map(torch.equal, result, expected))


def test_factors_that_are_not_positive():
    """Such factors are ordinary numbers: the codes are written out with them."""
    for factor in (0.0, -0.01):
        batch = Int8Batch()
        given = batch.quantize("one", "one", False)
        given["value_antiquant_scale"] = torch.tensor([factor])
        batch.meant.values = [x * torch.tensor(factor) for x in batch.codes.values]
        batch.check(fia(**batch.arguments(**given)))


def test_what_is_not_seen_does_not_matter():
    """Numbers of tokens past the lengths may be NaN."""
    for kind, offsets in itertools.product(("token", "slot of head"), (False, True)):
        batch = Int8Batch(blocks="H" if kind != "token" else None)
        given = batch.quantize(kind, kind, offsets)
        expected = fia(**batch.arguments(**given))
        for numbers in (x for x in given.values() if isinstance(x, torch.Tensor)):
            if kind == "token":
                for row, kv_len in zip(numbers, KV_LENS, strict=True):
                    row[kv_len:] = torch.nan
            else:
                numbers[batch.meant.tables[2, 0], :, KV_LENS[2] :] = torch.nan
        assert all(map(torch.equal, fia(**batch.arguments(**given)), expected))


def test_empty_sequences():
    flat = zeros(2, 3, 32)
    for kv in (zeros(2, 4, 32, dtype=torch.int8), zeros(2, 0, 32, dtype=torch.int8)):
        for numbers in (ones(1), ones(32)):
            scales = {f"{side}_antiquant_scale": numbers for side in ("key", "value")}
            options = {"actual_seq_lengths_kv": [0], "softmax_lse_flag": True}
            out, lse = fia(flat, kv, kv, **options, **scales)
            assert torch.all(out == 0)
            assert torch.all(torch.isneginf(lse))


SCALE, TOKENS = ones(1), ones(3, 22)
BOTH = {"key_antiquant_scale": SCALE, "value_antiquant_scale": SCALE}


def pair(numbers, mode):
    modes = {"key_antiquant_mode": mode, "value_antiquant_mode": mode}
    return {"key_antiquant_scale": numbers, "value_antiquant_scale": numbers} | modes


REFUSED = [
    ({}, "key of int8 needs antiquant_scale, or key_antiquant_scale and value_antiquant_scale"),
    ({"key_antiquant_scale": SCALE}, "key_antiquant_scale and value_antiquant_scale must be given"),
    ({**BOTH, "value_antiquant_offset": SCALE}, "key_antiquant_offset and value_antiquant_offset"),
    ({"antiquant_offset": SCALE}, "antiquant_offset needs antiquant_scale"),
    ({"key_antiquant_offset": SCALE, "value_antiquant_offset": SCALE}, "key_antiquant_offset need"),
    ({"antiquant_scale": ones(2), "antiquant_mode": 2}, "antiquant_mode must be 0 or 1, got"),
    ({**BOTH, "antiquant_mode": 1}, "antiquant_mode 1 needs antiquant_scale"),
    (pair(SCALE, 6), r"key_antiquant_mode must be in \[0, 5\], got 6"),
    (pair(SCALE, -1), r"key_antiquant_mode must be in \[0, 5\], got -1"),
    ({**BOTH, "key_antiquant_mode": 1}, "value_antiquant_mode must be key_antiquant_mode, or 1 be"),
    ({**BOTH, "value_antiquant_mode": 2}, "must be key_antiquant_mode, .*, got 2 beside 0"),
    (pair(None, 1) | {"antiquant_scale": ones(2)}, "and value_antiquant_mode 1 and 1 need key_ant"),
    ({"antiquant_scale": ones(3)}, r"antiquant_scale must be \[2, \.\.\.\], of key and"),
    ({"antiquant_scale": ones(2, 7)}, r"antiquant_scale must be one number, \[N, 1, D\]"),
    (pair(ones(2, 31), 0), r"key_antiquant_scale must be one number, .* got shape \[2, 31\]"),
    (pair(ones(2, 2, 32), 0), "key_antiquant_scale must be one number, "),
    (pair(ones(2, 32).half(), 0), "key_antiquant_scale must be contiguous and of float32 "),
    (pair(ones(32, 2).T, 0), "key_antiquant_scale must be contiguous"),
    (pair(ones(4), 2), r"key_antiquant_scale must be \[2\], one for each head, in mode 2"),
    (pair(ones(3, 21), 1), r"key_antiquant_scale must be \[B, S2 or more\] in mode 1, of 3 "),
    (pair(ones(2, 22), 1), "key_antiquant_scale must be .* of 3 and 22, got shape"),
    (pair(TOKENS.half(), 1), "key_antiquant_scale must be float32 and contiguous .* got float16"),
    (pair(ones(3, 4, 22), 3), r"key_antiquant_scale must be \[B, N, S2 or more\] in mode 3"),
    (pair(TOKENS, 4), "key_antiquant_scale of mode 4 needs block_table"),
    ({**BOTH, "value": zeros(3, 22, 2, 32)}, "value must be int8 with key_antiquant_scale, "),
    ({"antiquant_scale": ones(2), "key": zeros(3, 22, 2, 32)}, "key must be int8 with antiquant_s"),
    (
        BOTH | {"query_rope": zeros(3, 9, 4, 16), "key_rope": zeros(3, 22, 2, 16)},
        "query_rope is not",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: str(x)[:50])
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message) as error:
        fia(**Int8Batch().arguments() | change)
    assert str(error.value).startswith("npu_fused_infer_attention_score: ")


def test_refusals_of_blocks_and_of_packed_layouts():
    batch = Int8Batch(blocks="H")
    for numbers, mode, message in [
        (ones(7, 15), 4, r"must be \[blocks, block_size\] in mode 4, of 6 and 16, got"),
        (ones(6, 16), 5, r"must be \[blocks, N, block_size\] in mode 5"),
    ]:
        with pytest.raises(ValueError, match=f"key_antiquant_scale {message}"):
            fia(**batch.arguments(**pair(numbers, mode)))
    packed = FiaBatch("TND", Q_LENS, KV_LENS).arguments(**BOTH)
    packed |= {name: packed[name].to(torch.int8) for name in ("key", "value")}
    with pytest.raises(ValueError, match="TND does not take key of int8"):
        fia(**packed)
