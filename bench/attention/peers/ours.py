# SPDX-License-Identifier: Apache-2.0
"""cpattn: pages are read in place, in every layout; do_cp_attn_fia for a context-parallel rank."""

from __future__ import annotations

from typing import Any

import cpattn
from bench.attention.peers import Prepared
from bench.attention.peers.inputs import Inputs
from bench.attention.workloads import Workload


def prepare(work: Workload, inputs: Inputs, num_threads: int) -> Prepared:
    q, caches, tables = inputs.q, (inputs.k_cache, inputs.v_cache), inputs.block_tables
    # A single scale is a number, as in engines.
    scales: dict[str, Any] = {
        name: scale.item() if scale.numel() == 1 else scale
        for name, scale in (("k_scale", inputs.k_scale), ("v_scale", inputs.v_scale))
        if scale is not None
    }
    slopes = inputs.slopes
    if work.cp is None:
        return Prepared(
            lambda _: cpattn.paged_attention(
                q,
                *caches,
                q_lens=list(work.new),
                kv_lens=work.kv_lens,
                block_tables=tables,
                scale=work.scale,
                causal=not work.behind,
                window=(work.window, work.behind) if work.behind else work.window,
                alibi_slopes=slopes,
                batch_invariant=work.batch_invariant,
                num_threads=num_threads,
                **scales,
            )
        )
    cpattn.set_num_threads(num_threads)
    rank, size = work.cp
    metadata = cpattn.build_cp_metadata([work.cached], cp_rank=rank, cp_size=size)

    def run(_: None) -> Any:
        out: Any = cpattn.do_cp_attn_fia(
            q.flatten(1),
            *caches,
            metadata,
            block_tables=tables[:1],
            page_size=work.page_size,
            num_heads=work.num_heads,
            num_kv_heads=work.num_kv_heads,
            scale=work.scale,
        )
        return out.unflatten(1, (work.num_heads, work.v_head_dim))

    return Prepared(run)
