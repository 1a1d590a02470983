# SPDX-License-Identifier: Apache-2.0
"""Node tests of the operator `FlexAttention` of ONNX, whose graph changes scores: its result for
zeros is a bias, and its operators show a softcap."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from outside import onnx_nodes
from outside.dense import attend
from outside.suite import Case, InexpressibleError

Array = Any
ATTRIBUTES = {"scale", "score_mod", "softmax_precision"}


def cases() -> Iterator[Case]:
    yield from onnx_nodes.cases("flexattention", "FlexAttention", ATTRIBUTES, compute)


def compute(attributes: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    if q.dtype == np.float64:
        raise InexpressibleError("float64")
    options: dict[str, Any] = {"scale": attributes.get("scale")}
    if "score_mod" in attributes:
        options |= changed(attributes["score_mod"], (*q.shape[:3], k.shape[2]))
    return {"Y": attend(q, k, v, first=[0] * len(q), **options)}


def changed(graph: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a graph's change of scores of a shape, as options of `paged_attention`."""
    from onnx import numpy_helper
    from onnx.reference import ReferenceEvaluator

    if [node.op_type for node in graph.node] == ["Div", "Tanh", "Mul"]:
        (cap,) = {float(numpy_helper.to_array(x)) for x in graph.initializer}
        return {"softcap": cap}
    (name,) = [x.name for x in graph.input]
    evaluator = ReferenceEvaluator(graph, opsets={"": 22})
    scores = np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)
    added, of_scores = (evaluator.run(None, {name: x})[0] for x in (0 * scores, scores))
    if not np.array_equal(of_scores, scores + added):
        raise InexpressibleError("score_mod")
    return {"mask": added}
