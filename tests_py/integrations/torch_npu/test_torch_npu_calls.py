# SPDX-License-Identifier: Apache-2.0
"""Operators of torch_npu beside attention, and attention that writes into tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cpattn
from cpattn.integrations import torch_npu as integration
from support.npu.fia_cases import TEMPLATE, FiaBatch
from support.tolerances import assert_close, to_float64

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[Any]:
    with integration.install():
        import torch_npu

        yield torch_npu


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("lse", [False, True])
def test_writing_into_tensors(torch_npu, lse):
    """As graphs do, with a workspace; without the LSE its tensor may have any dtype."""
    batch = FiaBatch("TND", (5, 1, 7), (20, 17, 33), blocks="H")
    arguments = batch.arguments(sparse_mode=3, atten_mask=TEMPLATE, softmax_lse_flag=lse)
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        arguments[name] = [int(n) for n in arguments[name]]
    arguments["block_table"] = torch.from_numpy(arguments["block_table"])
    expected = cpattn.npu.npu_fused_infer_attention_score(**arguments)
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**arguments)
    assert workspace.numel() == 0
    written = [torch.full_like(x, 3) for x in expected]
    if not lse:
        written[1] = written[1].bfloat16()
    operator = torch_npu.npu_fused_infer_attention_score.out
    assert operator(**arguments, workspace=workspace, out=written) is None
    for result, wanted in zip(written, expected, strict=True):
        assert torch.equal(result, wanted.to(result.dtype))
    if lse:
        torch.library.opcheck(operator, (), arguments | {"out": written})
    with pytest.raises(ValueError, match=r"\.out: out must have the shapes of the results"):
        operator(**arguments, out=[written[0][:-1], written[1]])


@pytest.mark.parametrize(
    ("index_dtype", "dtype"), [(torch.int32, torch.bfloat16), (torch.int64, torch.uint8)]
)
def test_scatter(torch_npu, index_dtype, dtype):
    torch.manual_seed(0)
    pool = torch.randint(0, 99, (3, 8, 1, KV_HEADS, DIM)).to(dtype)
    rows = torch.randint(0, 99, (5, KV_HEADS, DIM)).to(dtype)
    slots = torch.tensor([9, 0, 23, 4, 12], dtype=index_dtype)
    expected = pool.clone()
    for slot, row in zip(slots.tolist(), rows, strict=True):
        expected[slot // 8, slot % 8, 0] = row
    buffer = pool.view(-1, KV_HEADS, DIM)
    assert torch_npu.npu_scatter_nd_update_(buffer, slots[:, None], rows) is buffer
    assert torch.equal(pool, expected)


def test_scatter_of_numbers_and_of_nothing(torch_npu):
    """A mapping from slots to slots."""
    mapping = torch.zeros(6, dtype=torch.int64)
    torch_npu.npu_scatter_nd_update_(mapping, torch.tensor([[4], [1]]), torch.tensor([7, 8]))
    torch_npu.npu_scatter_nd_update_(mapping, torch.zeros(0, 1).long(), torch.zeros(0).long())
    assert mapping.tolist() == [0, 8, 0, 0, 7, 0]


def test_the_last_row_of_a_slot_stays(torch_npu):
    torch.manual_seed(0)
    slots, rows = torch.randint(0, 50, (4000, 1)), torch.arange(4000.0)[:, None].repeat(1, 64)
    for _ in range(5):
        buffer = torch.full((50, 64), -1.0)
        torch_npu.npu_scatter_nd_update_(buffer, slots, rows)
        for slot in range(50):
            assert (buffer[slot] == (slots[:, 0] == slot).nonzero().max()).all()


BUFFER, INDICES, UPDATES = torch.zeros(5, 2), torch.tensor([[1], [4]]), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((BUFFER, INDICES.float(), UPDATES), TypeError, "indices must be int32 or int64, got"),
        ((BUFFER, INDICES[:, 0], UPDATES), ValueError, r"indices must have shape \[n, 1\]"),
        ((BUFFER, INDICES.expand(2, 2), UPDATES), ValueError, r"shape \[n, 1\].*got \[2, 2\]"),
        ((BUFFER, INDICES, UPDATES.half()), ValueError, "updates must have the dtype of self"),
        ((BUFFER, INDICES, UPDATES[:1]), ValueError, r"shape \[2, 2\], got \[1, 2\]"),
        ((BUFFER, INDICES + 1, UPDATES), ValueError, r"indices must be in \[0, 5\), got 5"),
        ((BUFFER, INDICES - 2, UPDATES), ValueError, r"indices must be in \[0, 5\), got -1"),
    ],
)
def test_what_scatter_refuses(torch_npu, arguments, error, message):
    with pytest.raises(error, match=f"npu_scatter_nd_update_: .*{message}"):
        torch_npu.npu_scatter_nd_update_(*arguments)
    assert not BUFFER.any()


def test_rows_are_not_written_into_a_copy_of_a_cache(torch_npu):
    """Caches whose slots have no common stride: keys and values of a block side by side."""
    wide = torch.zeros(4, 2, 8, KV_HEADS, DIM)
    rows = torch.ones(1, KV_HEADS, DIM)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        torch_npu._npu_reshape_and_cache(rows, rows, *wide.unbind(1), torch.tensor([9]))
    assert not wide.any()


def test_scatter_has_no_backward_and_autograd_sees_it(torch_npu):
    message = "npu_scatter_nd_update_: cpattn operators have no backward: updates requires"
    with pytest.raises(TypeError, match=message):
        torch_npu.npu_scatter_nd_update_(BUFFER.clone(), INDICES, UPDATES.clone().requires_grad_())
    weight, buffer = torch.ones(5, 2, requires_grad=True), BUFFER.clone()
    product = (weight * buffer).sum()
    torch_npu.npu_scatter_nd_update_(buffer, INDICES, UPDATES)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_scatter_in_a_graph(torch_npu):
    def run(buffer, indices, updates):
        doubled = 2 * buffer
        return torch_npu.npu_scatter_nd_update_(doubled, indices, updates) + 1

    scatter = torch.ops.npu.npu_scatter_nd_update_.default
    torch.library.opcheck(scatter, (BUFFER.clone(), INDICES, UPDATES))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(BUFFER, INDICES, UPDATES), run(BUFFER, INDICES, UPDATES))
    with pytest.raises(ValueError, match=r"indices must be in \[0, 5\), got 6"):
        compiled(BUFFER, INDICES + 2, UPDATES)


def test_scatter_from_two_threads(torch_npu):
    buffer = torch.zeros(64, 8)

    def write(first: int) -> None:
        rows = torch.arange(first, 64, 2)
        for value in range(20):
            updates = torch.full((32, 8), float(value + first))
            torch_npu.npu_scatter_nd_update_(buffer, rows[:, None], updates)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 1)))
    assert torch.equal(buffer[:, 0], torch.tensor([19.0, 20.0]).repeat(32))


def test_keys_and_values_in_one_call(torch_npu):
    """What a pool without the FIA layout calls."""
    torch.manual_seed(0)
    caches = torch.zeros(3, PAGE, KV_HEADS, DIM), torch.zeros(3, PAGE, KV_HEADS, 48)
    key, value = torch.randn(2, KV_HEADS, DIM), torch.randn(2, KV_HEADS, 48)
    given = {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1]}
    torch_npu._npu_reshape_and_cache(**given, slot_indices=ints(17, 2))
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[1, 1], rows[0])
        assert torch.equal(cache[0, 2], rows[1])
        assert int(cache.any(-1).any(-1).sum()) == 2


# Rotary embedding of the indexer.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotary_mul(torch_npu, dtype):
    torch.manual_seed(0)
    x = torch.randn(5, HEADS, 1, DIM).to(dtype)
    angles = torch.rand(5, 1, 1, DIM // 2).repeat(1, 1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    out = torch_npu.npu_rotary_mul(x, cos, sin)
    left, right = x.double().chunk(2, -1)
    parts = x.double() * cos.double(), torch.cat((-right, left), -1) * sin.double()
    assert out.dtype == dtype
    magnitude = parts[0].abs() + parts[1].abs()
    expected = map(to_float64, (sum(parts), magnitude))
    assert_close(out, *expected, "rotary", str(dtype).removeprefix("torch."))
    torch.library.opcheck(torch.ops.npu.npu_rotary_mul.default, (x, cos, sin))
    with pytest.raises(ValueError, match="npu_rotary_mul: rotary_mode must be half"):
        torch_npu.npu_rotary_mul(x, cos, sin, "interleave")
