# SPDX-License-Identifier: Apache-2.0
"""Node tests of ONNX: its own runner compares outputs with its reference's, by the tolerances of
each case."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from outside.suite import Case, InexpressibleError

Array = Any
#: Function from attributes and inputs of a node to its outputs, by their names in ONNX.
Compute = Callable[[Mapping[str, Any], Mapping[str, Array]], dict[str, Array]]


def cases(module: str, operator: str, attributes: set[str], compute: Compute) -> Iterator[Case]:
    """Yield the cases of an operator with attributes that `compute` reads or may ignore."""
    import_module(f"onnx.backend.test.case.node.{module}")
    from onnx.backend.test.case.node import _NodeTestCases

    for case in _NodeTestCases:
        if case.model.graph.node[0].op_type == operator:
            yield Case(case.name, partial(check, case, attributes, compute))


def check(case: Any, known: set[str], compute: Compute) -> str | None:
    from onnx.backend.test.runner import Runner
    from onnx.helper import get_attribute_value

    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    attributes = {a.name: get_attribute_value(a) for a in node.attribute}
    if unknown := sorted(set(attributes) - known):
        raise InexpressibleError(f"attributes {', '.join(unknown)}")
    # Missing optional inputs and outputs have an empty name, and no array.
    results = compute(attributes, dict(zip(filter(None, node.input), inputs, strict=True)))
    expected = dict(zip(filter(None, node.output), outputs, strict=True))
    compared = [name for name in expected if name in results]
    Runner.assert_similar_outputs(
        [expected[name] for name in compared],
        [results[name] for name in compared],
        rtol=case.rtol,
        atol=case.atol,
    )
    left_out = sorted(set(expected) - set(compared))
    return ", ".join(left_out) or None
