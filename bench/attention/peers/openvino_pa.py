# SPDX-License-Identifier: Apache-2.0
"""OpenVINO's PagedAttention in a model: pages of 32 tokens, new tokens written by the operator.

Its 8-bit cache is u8 with its own scales and zero points, for keys per channel of a page, for
values per token. It is compared with each of our 8-bit formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension

from bench.attention.peers import Kept, Prepared, Unsupported
from bench.attention.peers.inputs import Inputs
from bench.attention.workloads import Workload

KEPT = Kept()
PAGE_SIZE = 32  # the CPU plugin's
PAGES = 256  # written at a time, beforehand
TYPES = {"bfloat16": ov.Type.bf16, "float16": ov.Type.f16, "float32": ov.Type.f32}


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    cache: Cache = KEPT.get(inputs.k_cache, lambda: Cache.filled(inputs, num_threads))
    request = cache.model.create_infer_request()
    tensors = cache.tensors(inputs)  # held: the request does not own them
    for name, tensor in tensors.items():
        request.set_tensor(name, tensor)

    def run(_: None) -> torch.Tensor:
        request.infer()
        result = request.get_output_tensor(0)
        return _as_torch(result).view(-1, work.num_heads, work.v_head_dim)

    own = "u8, " if work.kv_dtype else ""
    return Prepared(run, note=f"{own}writes its cache within the call")


@dataclass(frozen=True)
class Cache:
    """A compiled model and the pages of its two caches, in the order of the sequences."""

    model: ov.CompiledModel
    caches: dict[str, ov.Tensor]
    pages: list[torch.Tensor]  # of each sequence

    @staticmethod
    def filled(inputs: Inputs, num_threads: int) -> Cache:
        """All tokens, written by the operator itself as one sequence for each page."""
        work = inputs.work
        dtype = TYPES[work.dtype]
        stored = ov.Type.u8 if work.kv_dtype else dtype
        settings = {
            "INFERENCE_NUM_THREADS": num_threads,
            "NUM_STREAMS": 1,
            "KV_CACHE_PRECISION": stored.get_type_name(),
            "INFERENCE_PRECISION_HINT": dtype.get_type_name(),
        }
        model = ov.Core().compile_model(_model(work, dtype), "CPU", settings)
        counts = [-(-length // PAGE_SIZE) for length in work.stored_lens]
        caches = {}
        for name in ("key_cache", "value_cache"):
            port = model.input(name)
            if port.element_type != stored:
                raise Unsupported(f"{work.cache_dtype} on this machine")
            shape = [side.get_length() for side in [*port.partial_shape][1:]]
            caches[name] = ov.Tensor(stored, ov.Shape([sum(counts), *shape]))
            caches[name].data[:] = 0
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
        made = Cache(model, caches, [*order.split(counts)])
        for i, length in enumerate(work.stored_lens):
            for begin in range(0, length, PAGES * PAGE_SIZE):
                made.write(inputs, i, begin, min(begin + PAGES * PAGE_SIZE, length))
        return made

    def write(self, inputs: Inputs, sequence: int, begin: int, end: int) -> None:
        ends = [*range(begin, end, PAGE_SIZE), end]
        pages = self.pages[sequence][begin // PAGE_SIZE : -(-end // PAGE_SIZE)]
        lengths = [b - a for a, b in pairwise(ends)]
        rows = [x.flatten(1) for x in inputs.tokens(sequence, begin, end)]
        q = inputs.q.new_zeros(end - begin, inputs.q[0].numel())
        tables = _tables([0] * len(lengths), lengths, [*pages.split(1)])
        request = self.model.create_infer_request()
        for name, tensor in {**_rows(q, *rows), **tables, **self.caches}.items():
            request.set_tensor(name, tensor)
        request.infer()

    def tensors(self, inputs: Inputs) -> dict[str, ov.Tensor]:
        """The arguments of a workload."""
        work = inputs.work
        fresh = [
            inputs.tokens(i, prefix, prefix + new)
            for i, (new, prefix) in enumerate(zip(work.new, work.prefix, strict=True))
        ]
        k, v = (torch.cat(parts).flatten(1) for parts in zip(*fresh, strict=True))
        pages = [
            own[: -(-length // PAGE_SIZE)]
            for own, length in zip(self.pages, work.kv_lens, strict=True)
        ]
        tables = _tables([*work.prefix], [*work.new], pages)
        return {**_rows(inputs.q.flatten(1), k, v), **tables, **self.caches}


def _rows(*rows: torch.Tensor) -> dict[str, ov.Tensor]:
    return {name: _as_openvino(x) for name, x in zip(("query", "key", "value"), rows, strict=True)}


def _tables(past: list[int], new: list[int], pages: list[torch.Tensor]) -> dict[str, ov.Tensor]:
    begins = [0, *accumulate(len(own) for own in pages)]
    longest = max(p + n for p, n in zip(past, new, strict=True))
    return {
        "past_lens": ov.Tensor(np.array(past, np.int32)),
        "subsequence_begins": ov.Tensor(np.array([0, *accumulate(new)], np.int32)),
        "block_indices": ov.Tensor(torch.cat(pages).numpy()),
        "block_indices_begins": ov.Tensor(np.array(begins, np.int32)),
        "max_context_len": ov.Tensor(np.array(longest, np.int32)),
    }


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


def _as_openvino(x: torch.Tensor) -> ov.Tensor:
    tensor = ov.Tensor(TYPES[str(x.dtype).removeprefix("torch.")], ov.Shape(x.shape))
    _as_torch(tensor).copy_(x)
    return tensor


def _as_torch(x: ov.Tensor) -> torch.Tensor:
    if x.element_type == ov.Type.bf16:
        return torch.from_numpy(x.data.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x.data)
