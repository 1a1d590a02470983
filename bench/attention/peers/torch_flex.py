# SPDX-License-Identifier: Apache-2.0
"""Compiled flex_attention with a block mask, which is made beforehand."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bench.attention.peers import Prepared, Unsupported
from bench.attention.peers.inputs import Batch, Inputs, Pairs
from bench.attention.workloads import Workload

compiled = torch.compile(flex_attention, dynamic=True)


def graphs() -> int:
    """The number of compilations so far: one for several shapes."""
    return counters["stats"]["unique_graphs"]


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    batches = inputs.batches()
    if len(batches) > 2:
        raise Unsupported("ragged batch: compiles for each length")
    torch.set_num_threads(num_threads)

    def block_mask(batch: Batch) -> BlockMask:
        prefix, window = torch.tensor(batch.prefix), work.window or 0

        def causal(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return j <= i + prefix

        def windowed(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return (j <= i + prefix + work.behind) & (j >= i + prefix - window)

        rule = causal if work.window is None else windowed
        return create_block_mask(rule, None, None, batch.new, batch.length, device="cpu")

    masks = [block_mask(batch) for batch in batches]

    def bias(batch: Batch) -> Any:
        prefix, slopes = torch.tensor(batch.prefix), inputs.slopes
        if slopes is None:
            return None
        return lambda score, b, h, i, j: score - slopes[h] * (i + prefix - j)

    biases = [bias(batch) for batch in batches]

    def run(pairs: Pairs) -> torch.Tensor:
        return inputs.assemble(
            compiled(
                *(inputs.queries(batch), k, v),
                score_mod=score_mod,
                block_mask=mask,
                scale=work.scale,
                enable_gqa=True,
            )
            for batch, (k, v), mask, score_mod in zip(batches, pairs, masks, biases, strict=True)
        )

    before = graphs()
    return Prepared(run, inputs.gather, compiled=lambda: graphs() != before)
