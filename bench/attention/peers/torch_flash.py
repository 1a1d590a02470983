# SPDX-License-Identifier: Apache-2.0
"""Two calls of torch's flash kernel, cached keys and new keys, merged by their LSE.

Without a mask it skips hidden keys: torch's fairest form of a prefix.
"""

from __future__ import annotations

import torch

from bench.attention.peers import Prepared, Unsupported
from bench.attention.peers.inputs import Batch, Inputs, Pairs
from bench.attention.workloads import Workload

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    if work.head_dim != work.v_head_dim:
        raise Unsupported("values of another width than keys")
    if work.window is not None:
        raise Unsupported("window")
    torch.set_num_threads(num_threads)

    def attend(batch: Batch, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, prefix = inputs.queries(batch), batch.prefix
        if batch.new == 1 or not prefix:
            return flash(q, k, v, 0.0, batch.new > 1, scale=work.scale)[0]
        old, old_lse = flash(q, k[:, :, :prefix], v[:, :, :prefix], 0.0, False, scale=work.scale)
        new, new_lse = flash(q, k[:, :, prefix:], v[:, :, prefix:], 0.0, True, scale=work.scale)
        weight = torch.sigmoid(old_lse - new_lse).unsqueeze(-1)
        return torch.lerp(new.float(), old.float(), weight).to(q.dtype)

    def run(pairs: Pairs) -> torch.Tensor:
        return inputs.assemble(
            attend(batch, *pair) for batch, pair in zip(inputs.batches(), pairs, strict=True)
        )

    return Prepared(run, inputs.gather)
