# SPDX-License-Identifier: Apache-2.0
"""Operators for torch fulfil torch's requirements, and equal the functions."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cpattn
import cpattn.integrations.torch_ops
from support.integrations.torch_op_calls import (
    DIM,
    HEADS,
    OPERATORS,
    as_tuple,
    calls,
    ints,
    npu_calls,
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Forget compiled functions, which torch counts by code; parametrized tests share code."""
    torch.compiler.reset()


CALLS = calls()
FIRST_OF_EACH = list({call.name: call for call in reversed(CALLS)}.values())
NPU_CALLS = npu_calls()
ALL_CALLS = [*CALLS, *NPU_CALLS]
ALL_OPERATORS = list({call.name: call for call in reversed(ALL_CALLS)}.values())
every_call = pytest.mark.parametrize("call", ALL_CALLS, ids=str)
every_out = pytest.mark.parametrize("call", FIRST_OF_EACH, ids=str)


def assert_same(results: Any, expected: Any) -> None:
    for result, wanted in zip(as_tuple(results), as_tuple(expected), strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def states() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(4)
    outs, lses = torch.randn(2, 5, 3, 16, generator=draw), torch.randn(2, 5, 3, generator=draw)
    return outs[0].clone(), lses[0].clone(), outs[1].clone(), lses[1].clone()


def test_all_operators_are_tested():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cpattn::")}
    tested = {f"cpattn::{call.name}{out}" for call in CALLS for out in ("", ".out")}
    assert names == tested | {"cpattn::merge_state"}


@every_call
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_equals_the_function(call, mode):
    expected = call.function()
    with mode():
        assert_same(call.operator(*call.args, **call.kwargs), expected)
        if call.library == "npu":
            return
        outputs = call.outputs()
        assert call.out(*call.args, **call.kwargs, **outputs) is None
    assert_same(tuple(outputs.values()), expected)
    # A tensor from inference mode can be used outside of it.
    call.out(*call.args, **call.kwargs, **outputs)
    assert_same(tuple(outputs.values()), expected)


@every_call
def test_opcheck(call):
    """Fake results have the shapes, dtypes and strides of real ones, but no numbers."""
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(call.operator, call.args, call.kwargs, test_utils=utilities)


@pytest.mark.slow
@pytest.mark.parametrize("call", ALL_OPERATORS, ids=str)
def test_opcheck_of_traces(call):
    torch.library.opcheck(call.operator, call.args, call.kwargs)


@pytest.mark.slow
@every_out
def test_opcheck_of_out(call):
    torch.library.opcheck(call.out, call.args, call.kwargs | call.outputs())


@pytest.mark.slow
def test_opcheck_of_merging():
    torch.library.opcheck(OPERATORS.merge_state.default, states())


def test_merging_and_in_one_graph():
    def run(out_a, lse_a, out_b, lse_b):
        out = out_a + 0
        OPERATORS.merge_state(out, lse_a, out_b, lse_b)
        return 2 * out

    parts, expected = states(), states()
    result = torch.compile(run, fullgraph=True, backend="aot_eager")(*parts)
    assert_same(parts[0], expected[0])
    cpattn.merge_state(*expected)
    assert_same((result, parts[1]), (2 * expected[0], expected[1]))
    parts = states()
    OPERATORS.merge_state(*parts)
    assert_same(parts, expected)


def test_one_graph_serves_all_lengths():
    """Lengths and tables are data; the numbers of tokens and of sequences are symbols."""
    call, backend = CALLS[0], CompileCounter()
    _, k_cache, v_cache = call.args

    def run(q, *args):
        options = dict(zip(("q_lens", "kv_lens", "block_tables"), args, strict=True))
        return OPERATORS.paged_attention(q, k_cache, v_cache, **options)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    tables = call.kwargs["block_tables"]
    for lens in ([7, 1, 2], [2, 4], [3, 1, 5, 6]):
        q, q_lens = torch.randn(sum(lens), HEADS, DIM), ints(*lens)
        args = (q_lens, q_lens + 2, tables[[i % 2 for i in range(len(lens))]])
        names = ("q_lens", "kv_lens", "block_tables")
        options = dict(zip(names, args, strict=True))
        expected = cpattn.paged_attention(q, k_cache, v_cache, **options, return_lse=True)
        assert_same(compiled(q, *args), expected)
    assert backend.frame_count == 1


@pytest.mark.parametrize("call", [call for call in ALL_OPERATORS if call.floats], ids=str)
def test_gradients_are_refused(call):
    position = call.floats[-1 if call.library == "cpattn" else 0]
    name = call.operator._schema.arguments[position].name
    args = list(call.args)
    args[position] = args[position].clone().requires_grad_()
    message = f"{call.name}: cpattn operators have no backward: {name} requires a gradient"
    with pytest.raises(TypeError, match=message):
        call.operator(*args, **call.kwargs)
    if call.library == "cpattn":
        with pytest.raises(TypeError, match=message):
            call.out(*args, **call.kwargs, **call.outputs())
    with torch.no_grad():
        results = as_tuple(call.operator(*args, **call.kwargs))
    assert_same(results, call.function())
    assert not any(result.requires_grad for result in results)


def test_gradients_of_keywords_are_refused():
    call = CALLS[1]
    kwargs = call.kwargs | {"sinks": torch.zeros(HEADS, requires_grad=True)}
    with pytest.raises(TypeError, match="have no backward: sinks requires a gradient"):
        call.operator(*call.args, **kwargs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_refused_while_compiling(backend):
    x = torch.randn(4, 64, requires_grad=True)
    compiled = torch.compile(OPERATORS.hadamard_transform, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="cpattn operators have no backward: x requires"):
        compiled(x)


def test_autograd_sees_what_was_overwritten_and_negated_views_are_plain():
    weight, out = torch.ones(64, requires_grad=True), torch.ones(64)
    product = (weight * out).sum()
    OPERATORS.hadamard_transform(torch.ones(64), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    # Negated views differ from their memory; torch makes plain tensors of them.
    x = torch.complex(torch.zeros(64), torch.randn(64)).conj().imag
    assert x.is_neg()
    expected = cpattn.sparse.hadamard_transform(x.resolve_neg())
    assert_same(OPERATORS.hadamard_transform(x), expected)


def test_errors_are_those_of_the_function():
    call = CALLS[0]
    with pytest.raises(ValueError, match="paged_attention: block_tables must have"):
        call.operator(*call.args, **call.kwargs | {"kv_lens": ints(16, 90)})
    score, lengths, topk = next(call for call in CALLS if call.name == "fast_topk").args
    out = torch.empty(3, topk + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="fast_topk"):
        OPERATORS.fast_topk.out(score, lengths, topk, out=out)
    call = NPU_CALLS[0]
    with pytest.raises(ValueError, match="npu_fused_infer_attention_score: sparse_mode must be"):
        call.operator(*call.args, **call.kwargs | {"sparse_mode": 7})
    with pytest.raises(ValueError, match="pse_shift is not supported"):
        call.operator(*call.args, **call.kwargs, pse_shift=torch.zeros(1))


@every_out
def test_outputs_of_another_shape_are_refused(call):
    wrong = {name: torch.cat([x, x], -1) for name, x in call.outputs().items()}
    with pytest.raises(ValueError, match=call.name):
        call.out(*call.args, **call.kwargs, **wrong)


def test_a_scale_is_a_number_or_a_tensor():
    given = [call for call in calls() if "k_scales" in call.kwargs]
    assert {call.name for call in given} == {"paged_attention", "do_cp_attn_fia"}
    for call, name in itertools.product(given, ("k_scale", "v_scale")):
        message = f"{call.name}: {name}s must not be given beside {name}"
        with pytest.raises(ValueError, match=message):
            call.operator(*call.args, **call.kwargs, **{name: 1.0})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_graph_on_codes_of_float8(dtype):
    call = CALLS[0]
    q, *caches = call.args
    codes = [cache.to(dtype) for cache in caches]
    scales = {"k_scale": 0.5, "v_scales": torch.tensor([0.5, 2.0])}

    def run(*args):
        return OPERATORS.paged_attention(*args, **call.kwargs, **scales)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    options = call.kwargs | {"k_scale": 0.5, "v_scale": scales["v_scales"]}
    expected = cpattn.paged_attention(q, *codes, **options, return_lse=True)
    assert_same(compiled(q, *codes), expected)
