# SPDX-License-Identifier: Apache-2.0
"""The stand-in for torch_npu, and its operators beside attention; test_integrations_torch_ops.py
has torch's requirements of attention operators."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cpattn
from cpattn.integrations import torch_npu as integration
from support.integrations.torch_op_calls import make_call, npu_calls
from support.npu.fia_cases import TEMPLATE, FiaBatch
from support.tolerances import assert_close, to_float64

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16


@pytest.fixture
def torch_npu() -> Iterator[Any]:
    with integration.install():
        import torch_npu

        yield torch_npu


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("lse", [False, True])
def test_writing_into_tensors(torch_npu, lse):
    """Graphs write into tensors, with a workspace; an unused LSE tensor may have any dtype."""
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
    """Slots are mapped to slots, or none are."""
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
    """Slots of these caches have no common stride: keys and values are side by side."""
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


def test_keys_and_values_in_one_call(torch_npu):
    torch.manual_seed(0)
    caches = torch.zeros(3, PAGE, KV_HEADS, DIM), torch.zeros(3, PAGE, KV_HEADS, 48)
    key, value = torch.randn(2, KV_HEADS, DIM), torch.randn(2, KV_HEADS, 48)
    given = {"key": key, "value": value, "key_cache": caches[0], "value_cache": caches[1]}
    torch_npu._npu_reshape_and_cache(**given, slot_indices=torch.tensor([17, 2]).int())
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


NAMES = {
    *("_npu_fused_infer_attention_score_get_max_workspace", "_npu_reshape_and_cache"),
    *("npu_fused_infer_attention_score", "npu_lightning_indexer", "npu_rotary_mul"),
    *("npu_scatter_nd_update_", "npu_sparse_flash_attention"),
}


def test_names(torch_npu):
    assert set(torch_npu.__all__) == NAMES
    for name in NAMES:
        assert callable(getattr(torch_npu, name))
        if not name.startswith("_"):
            assert getattr(torch_npu, name) is getattr(torch.ops.npu, name)
    assert not hasattr(torch, "npu")  # programs would take it for a device
    message = "torch_npu is cpattn's stand-in for CPUs and has no npu_rms_norm; it supplies .*"
    with pytest.raises(AttributeError, match=message + "npu_sparse_flash_attention"):
        torch_npu.npu_rms_norm  # noqa: B018
    assert not hasattr(torch_npu, "npu_scatter_pa_kv_cache")
    with pytest.raises(ImportError, match="cannot import name 'npu_rms_norm'"):
        exec("from torch_npu import npu_rms_norm")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torch_npu.contrib")


# Libraries can register operators without the module; then none of ours are registered.
REGISTERED_ALREADY = """
import sys, torch
from cpattn.integrations import torch_npu
library = torch.library.Library("npu", "FRAGMENT")
library.define("npu_rotary_mul(Tensor x) -> Tensor")
for attempt in range(2):
    try:
        torch_npu.install()
    except ImportError as error:
        assert "torch.ops.npu.npu_rotary_mul is registered already" in str(error)
    else:
        raise AssertionError("replaced")
assert "torch_npu" not in sys.modules
assert not hasattr(torch.ops.npu, "npu_lightning_indexer")
"""


def test_operators_of_the_real_package_are_not_replaced(children):
    children.python(REGISTERED_ALREADY)


def test_the_module_compiles(torch_npu):
    """A model calls ``torch_npu.x``; lengths in lists become symbols after they change."""
    backend = CompileCounter()

    def run(query, **options):
        return torch_npu.npu_fused_infer_attention_score(query, **options)[0]

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for i in range(6):
        q_lens, kv_lens = (5 - i % 3, 2 + i % 3), (20 + i, 40 - 3 * i)
        batch = FiaBatch("TND", q_lens, kv_lens, num_heads=2, blocks="H")
        arguments = batch.arguments(sparse_mode=3, atten_mask=TEMPLATE)
        call = make_call("npu_fused_infer_attention_score", "query", arguments)
        assert torch.equal(compiled(*call.args, **call.kwargs), call.function()[0])
    assert backend.frame_count <= 3  # fewer than batches


FIRST_OF_EACH = list({call.name: call for call in reversed(npu_calls())}.values())


@pytest.mark.parametrize("call", FIRST_OF_EACH, ids=str)
def test_arguments_are_those_of_the_functions(call):
    """Their order and defaults are as torch_npu documents them."""
    parameters = inspect.signature(getattr(cpattn.npu, call.name)).parameters.values()
    for parameter, argument in zip(parameters, call.operator._schema.arguments, strict=True):
        assert argument.name == parameter.name
        assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
        assert argument.has_default_value() == (parameter.default is not parameter.empty)
        assert not argument.has_default_value() or argument.default_value == parameter.default
