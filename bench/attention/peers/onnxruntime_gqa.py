# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's GroupQueryAttention on its own dense cache, to which it appends in place.

It has no bfloat16 on the CPU: such workloads are prepared and run in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnxruntime as ort
import torch
from onnx import TensorProto, helper

from bench.attention.peers import Prepared, Unsupported
from bench.attention.peers.inputs import Inputs
from bench.attention.workloads import Workload


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    if work.head_dim != work.v_head_dim:
        raise Unsupported("values of another width than keys")
    dtype = torch.float16 if work.dtype == "float16" else torch.float32
    session = _session(work, dtype, num_threads)
    bound = [
        _bind(session, [x.to(dtype) for x in tensors], batch.prefix)
        for batch, (k, v) in zip(inputs.batches(), inputs.gather(), strict=True)
        for tensors in _calls(inputs.queries(batch), k, v)
    ]

    def run(_: None) -> torch.Tensor:
        for binding, _ in bound:
            session.run_with_iobinding(binding)
        rows = [torch.from_numpy(out.numpy()).flatten(0, 1) for _, out in bound]
        return torch.cat(rows).unflatten(1, (work.num_heads, work.v_head_dim))

    note = "computes in float32" if work.dtype == "bfloat16" else ""
    return Prepared(run, note=note)


def _session(work: Workload, dtype: torch.dtype, num_threads: int) -> ort.InferenceSession:
    kind = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.FLOAT
    heads, kv_heads, dim = work.num_heads, work.num_kv_heads, work.head_dim
    names = ["query", "key", "value", "past_key", "past_value", "last", "total"]
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        ["out", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=work.scale,
        local_window_size=-1 if work.window is None else work.window + 1,
    )
    rows = {"query": heads, "key": kv_heads, "value": kv_heads, "out": heads}
    info: dict[str, tuple[Any, list[str | int | None]]] = {
        name: (kind, ["batch", "new", count * dim]) for name, count in rows.items()
    }
    for name in ("past_key", "past_value", "present_key", "present_value"):
        info[name] = (kind, ["batch", kv_heads, "length", dim])
    info |= {"last": (TensorProto.INT32, ["batch"]), "total": (TensorProto.INT32, [1])}
    values = {name: helper.make_tensor_value_info(name, *facts) for name, facts in info.items()}
    outputs = [values[name] for name in node.output]
    graph = helper.make_graph([node], "attention", [values[name] for name in names], outputs)
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _calls(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """A batch in one call for decode, else by sequence: it takes no batch with prefixes."""
    q = tensors[0]
    yield from [tensors] if q.shape[2] == 1 else zip(*(x.split(1) for x in tensors), strict=True)


def _bind(
    session: ort.InferenceSession, tensors: list[torch.Tensor], prefix: int
) -> tuple[ort.IOBinding, ort.OrtValue]:
    q, k, v = tensors
    size, length = k.shape[0], k.shape[2]

    def value(x: torch.Tensor) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(x.contiguous().numpy())

    def rows(x: torch.Tensor) -> ort.OrtValue:  # [size, heads, new, D] -> [size, new, heads * D]
        return value(x.transpose(1, 2).flatten(2))

    binding = session.io_binding()
    out = rows(torch.zeros_like(q))
    binding.bind_ortvalue_input("query", rows(q))
    binding.bind_ortvalue_output("out", out)
    for name, x in (("key", k), ("value", v)):
        binding.bind_ortvalue_input(name, rows(x[:, :, prefix:]))
        cache = value(x)  # past and present share it, so that nothing is copied
        binding.bind_ortvalue_input(f"past_{name}", cache)
        binding.bind_ortvalue_output(f"present_{name}", cache)
    last, total = torch.full((size,), length - 1), torch.tensor([length])
    binding.bind_ortvalue_input("last", value(last.int()))
    binding.bind_ortvalue_input("total", value(total.int()))
    return binding, out
