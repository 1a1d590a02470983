# SPDX-License-Identifier: Apache-2.0
"""Heads of any dimension have the bits of heads padded with zeros."""

import numpy as np
import pytest
import torch

import cpattn
from cpattn.npu import npu_sparse_flash_attention
from cpattn.sparse import flash_mla_sparse_fwd
from support.attention_cases import run
from support.cases import DTYPES, Case, assert_attention, make_inputs

SHORT = Case(q_lens=(1, 3, 0), kv_lens=(1200, 70, 5), num_heads=6, num_kv_heads=2, page_size=64)
LONG = Case(q_lens=(130, 3), kv_lens=(700, 40), num_heads=4, num_kv_heads=2)
DIMS = [(20, 20), (24, 40), (1, 1), (8, 130), (72, 64), (64, 72), (575, 511)]
#: Instruction sets with other kernels for prompts if rows need no padding.
AMX = ("amx", "amx-twin")


def padded(x: torch.Tensor) -> torch.Tensor:
    """Return x, padded with zeros to a multiple of 16."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 16))


def with_zeros(inputs: dict) -> dict:
    caches = {name: padded(inputs[name]) for name in ("q", "k_cache", "v_cache")}
    return inputs | caches | {"scale": inputs.get("scale", inputs["q"].shape[-1] ** -0.5)}


@pytest.mark.parametrize("case", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), DIMS)
def test_bits_are_those_of_rows_with_zeros(isa, case, dtype, head_dim, v_head_dim):
    case = case.with_(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
    case = case.with_(options={"scale": head_dim**-0.5})
    inputs = make_inputs(case)
    out, lse = run(inputs)
    assert out.shape[-1] == v_head_dim
    if isa in AMX and dtype != "float32":
        assert_attention(out, lse, inputs)
        return
    expected, expected_lse = run(with_zeros(inputs))
    assert torch.equal(out, expected[..., :v_head_dim])
    assert torch.equal(lse, expected_lse)
    assert not expected[..., v_head_dim:].any()


def test_out_is_written_in_its_columns_alone(isa):
    for case in (SHORT, LONG):
        inputs = make_inputs(case.with_(head_dim=24, v_head_dim=20))
        whole = torch.full((sum(case.q_lens), case.num_heads, 32), 7.0)
        cpattn.paged_attention(**inputs, out=whole[..., 4:24])
        assert (whole[..., :4] == 7).all()
        assert (whole[..., 24:] == 7).all()
        assert torch.equal(whole[..., 4:24], run(inputs)[0])


@pytest.mark.parametrize("rope_dim", [16, 20])
def test_latents_have_any_number_of_dimensions(isa, rope_dim):
    """Values of absorbed MLA of small models are a part of the keys."""
    for case in (SHORT, LONG):
        case = case.with_(head_dim=44 + rope_dim, num_kv_heads=1, options={"scale": 0.2})
        inputs = make_inputs(case)
        inputs["v_cache"] = inputs["k_cache"][..., :44]
        assert_attention(*run(inputs), inputs)


def test_parts_of_a_head_are_at_most_576_dimensions_with_their_zeros():
    with pytest.raises(ValueError, match=r"filled up .* at most 576 together, got 559 and 17$"):
        npu_sparse_flash_attention(
            torch.zeros(1, 1, 559), torch.zeros(1, 1, 1, 559), torch.zeros(1, 1, 1, 559),
            torch.zeros(1, 1, 1, dtype=torch.int32), 1.0,
            query_rope=torch.zeros(1, 1, 17), key_rope=torch.zeros(1, 1, 1, 17),
            actual_seq_lengths_query=[1], actual_seq_lengths_kv=[1],
            block_table=np.zeros((1, 1), np.int32), layout_query="TND", layout_kv="PA_BSND",
            attention_mode=2,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_keys_have_any_number_of_dimensions(isa, dtype):
    generator = torch.Generator().manual_seed(1)
    q, kv = (torch.randn(n, 4 if n == 5 else 1, 60, generator=generator) for n in (5, 90))
    q, kv = q.to(getattr(torch, dtype)), kv.to(getattr(torch, dtype))
    indices = torch.stack([torch.randperm(90, generator=generator)[:33] for _ in range(5)])
    indices = indices[:, None].int()
    out, _, lse = flash_mla_sparse_fwd(q, kv, indices, 0.2, d_v=41)
    expected, _, expected_lse = flash_mla_sparse_fwd(padded(q), padded(kv), indices, 0.2, d_v=48)
    if isa in AMX and dtype != "float32":
        keys = kv[indices[:, 0].long(), 0]
        inputs = {
            "q": q, "k_cache": keys[:, :, None], "v_cache": keys[:, :, None, :41],
            "q_lens": [1] * 5, "kv_lens": [33] * 5, "block_tables": np.arange(5)[:, None],
            "scale": 0.2,
        }  # fmt: skip
        assert_attention(out, lse, inputs)
        return
    assert torch.equal(out, expected[..., :41])
    assert torch.equal(lse, expected_lse)
