# SPDX-License-Identifier: Apache-2.0
"""zentorch's SDPA: dense only, causal from the top left or with an additive mask.

Its second output, the LSE, is uninitialised memory, so a prefix cannot go through two calls.
"""

from __future__ import annotations

import torch
import zentorch  # noqa: F401 (registers the operator)

from bench.attention.peers import Prepared, Unsupported
from bench.attention.peers.inputs import Inputs, Pairs
from bench.attention.workloads import Workload


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    if work.head_dim != work.v_head_dim:
        raise Unsupported("values of another width than keys")
    torch.set_num_threads(num_threads)
    batches = inputs.batches()
    dtype = inputs.q.dtype
    causal = [batch.new > 1 and not batch.prefix and work.window is None for batch in batches]
    masks = [
        None if mask is None or plain else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        for mask, plain in zip(inputs.masks(), causal, strict=True)
    ]
    masks = [None if mask is None else mask.to(dtype)[None, None] for mask in masks]

    def run(pairs: Pairs) -> torch.Tensor:
        return inputs.assemble(
            torch.ops.zentorch.zentorch_sdpa(
                inputs.queries(batch), k, v, 0.0, plain, attn_mask=mask, scale=work.scale
            )[0]
            for batch, (k, v), plain, mask in zip(batches, pairs, causal, masks, strict=True)
        )

    return Prepared(run, inputs.gather)
