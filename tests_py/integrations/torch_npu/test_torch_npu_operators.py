# SPDX-License-Identifier: Apache-2.0
"""torch.ops.npu: what torch asks of operators, and equality with the functions and the oracle."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cpattn
from cpattn.integrations import torch_npu
from support.npu.fia_cases import LAYOUTS, TEMPLATE, FiaBatch
from support.npu.lightning_cases import FORMS, Operator
from support.npu.sparse_flash_cases import Batch, Case, assert_query

with torch_npu.install():  # registers them
    OPERATORS = torch.ops.npu


@dataclass(frozen=True)
class Call:
    """Arguments of an operator; tensors and lists, as torch_npu takes them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.label}"

    @property
    def operator(self) -> Any:
        return getattr(OPERATORS, self.name).default

    def function(self) -> tuple[torch.Tensor, ...]:
        return getattr(cpattn.npu, self.name)(*self.args, **self.kwargs)


def make_call(name: str, positional: str, arguments: dict[str, Any], label: str = "") -> Call:
    def convert(key: str, value: Any) -> Any:
        if key.startswith("actual_seq"):
            lengths = [int(x) for x in value]
            return lengths if "infer" in name else torch.tensor(lengths, dtype=torch.int32)
        return torch.from_numpy(value) if key == "block_table" and value is not None else value

    arguments = {key: convert(key, value) for key, value in arguments.items()}
    return Call(name, tuple(arguments.pop(key) for key in positional.split()), arguments, label)


def fia_call(layout: str, blocks: str | None, **changes: Any) -> Call:
    batch = FiaBatch(layout, (5, 1, 7), (20, 17, 7), blocks=blocks, v_head_dim=48)
    changes = {"sparse_mode": 3, "atten_mask": TEMPLATE} | changes
    label = f"{layout} {blocks} {changes.get('softmax_lse_flag', '')}"
    arguments = batch.arguments(**changes)
    return make_call("npu_fused_infer_attention_score", "query key value", arguments, label)


def indexer_call(form: tuple[str, str], **changes: Any) -> Call:
    arguments = Operator(form).arguments(**changes)
    return make_call("npu_lightning_indexer", "query key weights", arguments, " ".join(form))


def sparse_call(case: Case, **changes: Any) -> Call:
    arguments = Batch(case, torch.float32).arguments(**changes)
    positional = "query key value sparse_indices scale_value"
    return make_call("npu_sparse_flash_attention", positional, arguments, str(case))


FIA_CALLS = [
    fia_call(layout, blocks, softmax_lse_flag=lse)
    for layout in LAYOUTS
    for blocks, lse in ((None, True), ("H", False), ("N", True))
    if blocks != "N" or layout[:3] in ("BNS", "TND", "NTD")
]
SPARSE_CASES = [
    Case(),
    Case(layout_kv="TND"),
    Case(layout_query="BSND"),
    Case(layout_query="BSND", layout_kv="BSND", block=3, rope_dim=0),
]
CALLS = [
    *FIA_CALLS,
    *(indexer_call(form, return_value=value) for form in FORMS for value in (False, True)),
    *(sparse_call(case, return_softmax_lse=lse) for case in SPARSE_CASES for lse in (False, True)),
]
FIRST_OF_EACH = list({call.name: call for call in reversed(CALLS)}.values())
every_call = pytest.mark.parametrize("call", CALLS, ids=str)
every_operator = pytest.mark.parametrize("call", FIRST_OF_EACH, ids=str)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch.compiler.reset()


def assert_same(results: Any, expected: Any) -> None:
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@every_call
def test_equals_the_function(call):
    assert_same(call.operator(*call.args, **call.kwargs), call.function())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_against_the_oracle(layout):
    batch = FiaBatch(layout, (5, 1, 7), (20, 17, 7), v_head_dim=48)
    call = fia_call(layout, None, softmax_lse_flag=True)
    batch.check(call.operator(*call.args, **call.kwargs), mode=3)


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_indexer_against_the_oracle(form):
    call = indexer_call(form, return_value=True)
    Operator(form).check(call.operator(*call.args, **call.kwargs), values=True)


@pytest.mark.parametrize("case", SPARSE_CASES, ids=str)
def test_sparse_attention_against_the_oracle(case):
    call = sparse_call(case, return_softmax_lse=True)
    out, softmax_max, softmax_sum = call.operator(*call.args, **call.kwargs)
    out = out if out.dim() == 4 else out[None]
    for (b, i), attended, largest in Batch(case, torch.float32).expected():
        found = (x[b, ..., i, :] for x in (softmax_max, softmax_sum))
        assert_query(out[b, i], *found, attended, largest)


@every_operator
def test_opcheck(call):
    torch.library.opcheck(call.operator, call.args, call.kwargs)


@every_call
def test_fake_results(call):
    """Meta tensors, and the fake ones of tracing: shapes, dtypes and strides without numbers."""

    def like(convert: Any, value: Any) -> Any:
        return convert(value) if isinstance(value, torch.Tensor) else value

    fake = FakeTensorMode()
    for mode, convert in ((fake, fake.from_tensor), (nullcontext(), lambda x: x.to("meta"))):
        args = [like(convert, value) for value in call.args]
        kwargs = {key: like(convert, value) for key, value in call.kwargs.items()}
        with mode:
            results = call.operator(*args, **kwargs)
        for result, real in zip(results, call.function(), strict=True):
            assert (result.shape, result.dtype) == (real.shape, real.dtype)
            assert result.stride() == real.stride()


@every_operator
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_graph(call, backend):
    compiled = torch.compile(
        lambda *args, **kwargs: getattr(OPERATORS, call.name)(*args, **kwargs),
        fullgraph=True,
        backend=backend,
    )
    assert_same(compiled(*call.args, **call.kwargs), call.function())


def test_the_module_compiles():
    """A model calls ``torch_npu.x``; lengths in lists become symbols once they have changed."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with torch_npu.install():
        import torch_npu as module

        compiled = torch.compile(
            lambda query, **options: module.npu_fused_infer_attention_score(query, **options)[0],
            fullgraph=True,
            backend=backend,
        )
        for i in range(6):
            q_lens, kv_lens = (5 - i % 3, 2 + i % 3), (20 + i, 40 - 3 * i)
            batch = FiaBatch("TND", q_lens, kv_lens, num_heads=2, blocks="H")
            arguments = batch.arguments(sparse_mode=3, atten_mask=TEMPLATE)
            call = make_call("npu_fused_infer_attention_score", "query", arguments)
            assert_same([compiled(*call.args, **call.kwargs)], call.function()[:1])
    assert len(graphs) <= 3  # not one for each batch


@every_operator
def test_inference_mode(call):
    with torch.inference_mode():
        assert_same(call.operator(*call.args, **call.kwargs), call.function())


@every_operator
def test_gradients_are_refused(call):
    query = call.args[0].clone().requires_grad_()
    message = f"{call.name}: cpattn operators have no backward: query requires a gradient"
    with pytest.raises(TypeError, match=message):
        call.operator(query, *call.args[1:], **call.kwargs)
    with torch.no_grad():
        results = call.operator(query, *call.args[1:], **call.kwargs)
    assert_same(results, call.function())


@every_operator
def test_two_threads(call):
    def run(_: int) -> tuple[torch.Tensor, ...]:
        return call.operator(*call.args, **call.kwargs)

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(run, range(8)):
            assert_same(results, call.function())


def test_errors_are_those_of_the_function():
    call = FIA_CALLS[0]
    with pytest.raises(ValueError, match="npu_fused_infer_attention_score: sparse_mode must be"):
        call.operator(*call.args, **call.kwargs | {"sparse_mode": 7})
    with pytest.raises(ValueError, match="pse_shift is not supported"):
        call.operator(*call.args, **call.kwargs, pse_shift=torch.zeros(1))


def test_arguments_are_those_of_the_functions():
    """In their order and with their defaults, as torch_npu documents them."""
    for name in {call.name for call in CALLS}:
        parameters = inspect.signature(getattr(cpattn.npu, name)).parameters.values()
        arguments = getattr(OPERATORS, name).default._schema.arguments
        for parameter, argument in zip(parameters, arguments, strict=True):
            assert argument.name == parameter.name
            assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
            assert argument.has_default_value() == (parameter.default is not parameter.empty)
            assert not argument.has_default_value() or argument.default_value == parameter.default
