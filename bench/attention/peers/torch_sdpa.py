# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention with a mask: is_causal aligns to the top left, prefixes need one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.attention.peers import Prepared
from bench.attention.peers.inputs import Inputs, Pairs
from bench.attention.workloads import Workload


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    torch.set_num_threads(num_threads)
    batches, masks = inputs.batches(), inputs.masks()

    def run(pairs: Pairs) -> torch.Tensor:
        return inputs.assemble(
            F.scaled_dot_product_attention(
                inputs.queries(batch), k, v, attn_mask=mask, scale=work.scale, enable_gqa=True
            )
            for batch, (k, v), mask in zip(batches, pairs, masks, strict=True)
        )

    return Prepared(run, inputs.gather)
