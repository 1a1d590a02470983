# SPDX-License-Identifier: Apache-2.0
"""torch.ops.npu within a model, from threads and by its schema.

What torch asks of every operator is in test_integrations_torch_ops.py.
"""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cpattn
from cpattn.integrations import torch_npu
from support.integrations.npu_op_calls import calls, make_call
from support.npu.fia_cases import TEMPLATE, FiaBatch

FIRST_OF_EACH = list({call.name: call for call in reversed(calls())}.values())
every_operator = pytest.mark.parametrize("call", FIRST_OF_EACH, ids=str)


def test_the_module_compiles():
    """A model calls ``torch_npu.x``; lengths in lists become symbols once they have changed."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with torch_npu.install():
        import torch_npu as module

        def run(query, **options):
            return module.npu_fused_infer_attention_score(query, **options)[0]

        compiled = torch.compile(run, fullgraph=True, backend=backend)
        for i in range(6):
            q_lens, kv_lens = (5 - i % 3, 2 + i % 3), (20 + i, 40 - 3 * i)
            batch = FiaBatch("TND", q_lens, kv_lens, num_heads=2, blocks="H")
            arguments = batch.arguments(sparse_mode=3, atten_mask=TEMPLATE)
            call = make_call("npu_fused_infer_attention_score", "query", arguments)
            assert torch.equal(compiled(*call.args, **call.kwargs), call.function()[0])
    assert len(graphs) <= 3  # not one for each batch


@every_operator
def test_two_threads(call):
    def run(_):
        return call.operator(*call.args, **call.kwargs)

    expected = call.function()
    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(run, range(8)):
            assert all(map(torch.equal, results, expected))


@every_operator
def test_arguments_are_those_of_the_functions(call):
    """In their order and with their defaults, as torch_npu documents them."""
    parameters = inspect.signature(getattr(cpattn.npu, call.name)).parameters.values()
    for parameter, argument in zip(parameters, call.operator._schema.arguments, strict=True):
        assert argument.name == parameter.name
        assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
        assert argument.has_default_value() == (parameter.default is not parameter.empty)
        assert not argument.has_default_value() or argument.default_value == parameter.default
