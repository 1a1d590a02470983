# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's PagedAttention in a model of its own: pages of 32 tokens, new tokens written by it."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from bench.attention.peers import Prepared, Unsupported
from bench.attention.peers.inputs import Inputs
from bench.attention.workloads import Workload

PAGE_SIZE = 32  # the CPU plugin's
TYPES = {"bfloat16": ov.Type.bf16, "float16": ov.Type.f16, "float32": ov.Type.f32}


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    dtype = TYPES[work.dtype]
    settings = {
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": 1,
        "KV_CACHE_PRECISION": dtype.get_type_name(),
        "INFERENCE_PRECISION_HINT": dtype.get_type_name(),
    }
    compiled = ov.Core().compile_model(_model(work, dtype), "CPU", settings)
    if compiled.input("key_cache").element_type != dtype:
        raise Unsupported(f"{work.dtype} on this machine")
    request = compiled.create_infer_request()
    tensors = _tensors(work, inputs)  # held: the request does not own them
    for name, tensor in tensors.items():
        request.set_tensor(name, tensor)

    def run(_: None) -> torch.Tensor:
        request.infer()
        result = request.get_output_tensor(0)
        return _as_torch(result).view(-1, work.num_heads, work.v_head_dim)

    return Prepared(run, note="writes its cache within the call")


def _model(work: Workload, dtype: ov.Type) -> ov.Model:
    i32, f32 = ov.Type.i32, ov.Type.f32
    heads, kv_heads, dim, v_dim = work.num_heads, work.num_kv_heads, work.head_dim, work.v_head_dim

    def parameter(name: str, kind: ov.Type, shape: list[int]) -> ov.Node:
        node = ops.parameter(ov.PartialShape(shape), kind)
        node.output(0).get_tensor().set_names({name})
        return node

    def constant(value: object, kind: ov.Type) -> ov.Node:
        return ops.constant(np.asarray(value), dtype=kind)

    none = constant(np.zeros(0), i32)
    tensors = [
        parameter("query", dtype, [-1, heads * dim]),
        parameter("key", dtype, [-1, kv_heads * dim]),
        parameter("value", dtype, [-1, kv_heads * v_dim]),
        parameter("key_cache", ov.Type.dynamic, [-1, kv_heads, -1, dim]),
        parameter("value_cache", ov.Type.dynamic, [-1, kv_heads, -1, v_dim]),
    ]
    lengths = ["past_lens", "subsequence_begins", "block_indices", "block_indices_begins"]
    tables = [parameter(name, i32, [-1]) for name in lengths]
    longest = parameter("max_context_len", i32, [])
    window = 0 if work.window is None else work.window + 1  # counts a token's own key
    options = [constant(work.scale, f32), constant(window, i32), constant(np.zeros(0), f32)]
    rotation = [none, constant(np.zeros((0, 0)), i32), constant(np.zeros((0, 0)), f32)]
    sparsity = [constant(np.zeros(0), f32), constant(64, i32), constant(8, i32)]
    eviction = [constant(np.zeros(0), f32), constant(0, i32), none, none, none]  # sinks first
    tree = [none, constant(np.zeros(0), ov.Type.u8), none]
    nodes = [*tensors, *tables, *options, longest, none, *rotation, *sparsity, *eviction, *tree]
    attention = _PagedAttentionExtension([node.output(0) for node in nodes])
    facts = attention.get_rt_info()
    facts["num_k_heads"] = facts["num_v_heads"] = kv_heads
    facts["k_head_size"], facts["v_head_size"] = dim, v_dim
    result = ops.result(attention.output(0))
    return ov.Model([result], [*tensors, *tables, longest], "paged_attention")


def _tensors(work: Workload, inputs: Inputs) -> dict[str, ov.Tensor]:
    pages = [-(-length // PAGE_SIZE) for length in work.kv_lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int()
    tables = order.split(pages)
    dims = {"key": work.head_dim, "value": work.v_head_dim}
    caches = {
        name: inputs.q.new_zeros(sum(pages), work.num_kv_heads, PAGE_SIZE, dim)
        for name, dim in dims.items()
    }
    fresh: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
    sequence = 0
    for batch, pair in zip(inputs.batches(), inputs.gather(), strict=True):
        for i in range(batch.size):
            table = tables[sequence].long()
            for name, x in zip(dims, pair, strict=True):
                rows = x[i].transpose(0, 1)  # [length, Hk, D]
                padding = len(table) * PAGE_SIZE - batch.length
                paged = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, padding))
                caches[name][table] = paged.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2)
                fresh[name].append(rows[batch.prefix :].flatten(1))
            sequence += 1
    return {
        "query": _as_openvino(inputs.q.flatten(1)),
        **{name: _as_openvino(torch.cat(rows)) for name, rows in fresh.items()},
        **{f"{name}_cache": _as_openvino(cache) for name, cache in caches.items()},
        "past_lens": ov.Tensor(np.array(work.prefix, np.int32)),
        "subsequence_begins": ov.Tensor(np.array([0, *accumulate(work.new)], np.int32)),
        "block_indices": ov.Tensor(order.numpy()),
        "block_indices_begins": ov.Tensor(np.array([0, *accumulate(pages)], np.int32)),
        "max_context_len": ov.Tensor(np.array(max(work.kv_lens), np.int32)),
    }


def _as_openvino(x: torch.Tensor) -> ov.Tensor:
    tensor = ov.Tensor(TYPES[str(x.dtype).removeprefix("torch.")], ov.Shape(x.shape))
    _as_torch(tensor).copy_(x)
    return tensor


def _as_torch(x: ov.Tensor) -> torch.Tensor:
    if x.element_type == ov.Type.bf16:
        return torch.from_numpy(x.data.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x.data)
